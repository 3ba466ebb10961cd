"""The decoding state of a model as `transformers` passes it from one step of `generate` to the next."""

import torch
from torch import Tensor

from basecap.mixers import Cache
from basecap.models import LanguageModel
from basecap.models.language_model import Caches


class DecodingCache:
    """The caches of all blocks, made when the first prompt is read.

    It has what `generate` asks of a cache, and cannot be cropped: a state is no list of tokens.
    """

    #: Read by `generate`: no graph is compiled for it, and tokens that were read cannot be taken back.
    is_compileable = False
    is_croppable = False

    def __init__(self, max_length: int):
        """Make room for `max_length` tokens of each sequence, those of the prompt included."""
        self.max_length = max_length
        self.caches: Caches | None = None

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has a state instead of a list of tokens; true, as no part of a prompt can be skipped."""
        return [True]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that were read, of the longest sequence."""
        return 0 if self.caches is None else int(self.caches[layer_idx].mixer.length)

    def read(self, model: LanguageModel, tokens_BT: Tensor) -> Tensor:
        """Read a prompt, or one token more [B, 1]; return the logits of the token after it [B, vocab].

        Raises:
            ConfigError: more tokens than there are learned positions, or several more after a prompt.
        """
        if self.caches is None:
            self.caches = model.init_cache(len(tokens_BT), self.max_length)
            return model.prefill(tokens_BT, self.caches)
        return model.step(tokens_BT, self.caches)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i continue what sequence `beam_idx[i]`, int64 [B], has read, for beam search."""
        for block in self.caches or ():
            for cache in (block.mixer, block.feed_forward):
                _reorder(cache, beam_idx)


@torch.no_grad()
def _reorder(cache: Cache, rows: Tensor) -> None:
    for tensor in cache.tensors.values():
        tensor.copy_(tensor.index_select(0, rows.to(tensor.device)))

"""The decoding state of a model as `transformers` passes it from one step of `generate` to the next."""

from torch import Tensor

from basecap.errors import ConfigError
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

    def read(self, model: LanguageModel, tokens_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Read prompts, or one token more of each [B, 1]; return the logits of the token after it [B, vocab].

        `mask_BT` is 0 where a prompt is padded on the left; it is not used after the prompt.

        Raises:
            ConfigError: a prompt without tokens, or that ends with padding, more tokens than learned positions, or
                several tokens after a prompt.
        """
        if self.caches is not None:
            return model.step(tokens_BT, self.caches)
        self.caches = model.init_cache(len(tokens_BT), self.max_length)
        if mask_BT is None or bool(mask_BT.all()):
            return model.prefill(tokens_BT, self.caches)
        if not bool(mask_BT.any(dim=1).all()):
            raise ConfigError("a prompt to continue has no token; begin an empty one with bos_token.")
        if not bool(mask_BT[:, -1].all()):
            raise ConfigError("a prompt to continue is padded on the right; set tokenizer.padding_side = 'left'.")
        prompts = [row[own] for row, own in zip(tokens_BT, mask_BT.bool(), strict=True)]
        return model.prefill_each(prompts, self.caches)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i continue what sequence `beam_idx[i]`, int64 [B], has read, for beam search."""
        self.caches = [cache.take(beam_idx) for cache in self.caches or ()]

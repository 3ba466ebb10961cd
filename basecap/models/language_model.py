"""The one language model: embedding, blocks, norm, head; training loss, logits and decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from basecap.errors import ConfigError
from basecap.mixers import (
    Cache,
    ParameterRecipe,
    default_recipe,
    initialise,
    normal,
    positions_of,
)
from basecap.models._compiler import reset_compiler
from basecap.models.backbones import BACKBONES, Backbone
from basecap.models.blocks import (
    Block,
    BlockCache,
    BlockForward,
    Stream,
    gather_auxiliary,
    names_of_auxiliary,
    nothing_added,
    through,
    total,
)
from basecap.models.config import ModelConfig
from basecap.models.decoder import Decoder
from basecap.models.ngrams import NgramEmbedding
from basecap.models.prompts import AT_ONCE, ends_of, read_each, refuse_filled, rows_of
from basecap.ops import check_devices, check_segments, keep_choice, keep_products
from basecap.ops.linear_cross_entropy import linear_cross_entropy

Caches = list[BlockCache]

#: Tokens of each prompt that a model which declares `continues` reads at once: more would only take memory.
PIECE = 16_384


class LanguageModel(nn.Module):
    """A causal language model of any architecture.

    Parameters are uninitialised until `initialise(seed)`; weights of a checkpoint can be loaded instead.

    Attributes:
        config: what is built.
        checkpointing: whether the backward pass recomputes each block, "selective" all but the costly parts of it.
        compiled: whether `compile_training` was called.
        auxiliary_losses: names of the losses that its mixers add in training.
    """

    def __init__(self, config: ModelConfig, *, checkpointing: bool | Literal["selective"] = False):
        """Build the modules of `config`."""
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        self.embedding = _embedding(config.vocab, config.hidden)
        learned = self.backbone.positions == "learned"
        self.positions = _embedding(config.max_length, config.hidden) if learned else None
        self.ngrams = NgramEmbedding(config.ngram, config.hidden) if config.ngram else None
        self.embedding_norm = nn.LayerNorm(config.hidden, 1e-5) if self.backbone.embedding_norm else None
        self._blocks = [Block(self.backbone, mixer) for mixer in config.build_mixers()]
        self.blocks = nn.ModuleList(self._blocks)
        decoded = config.readout == "last"
        self.decoder = Decoder(config.hidden, self.backbone.make_norm) if decoded else None
        self.norm = self.backbone.make_norm(config.hidden)
        self.head = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)
        self.auxiliary_losses = names_of_auxiliary(self._blocks)
        self._training_blocks: list[BlockForward] = [*self._blocks]
        self._training_loss: Callable[..., Tensor] = self._loss
        self._few_shapes_losses: Callable[..., Tensor] = _token_losses
        self.compiled = False
        self._block_prefills: list[Callable[..., Stream]] = [block.prefill for block in self._blocks]
        # Where the state grows with its length, as keys and values do, a prompt is read faster whole.
        self._whole_prompts = not self.continues or self.state_bytes(2 * PIECE) > self.state_bytes(PIECE)
        self._block_steps: list[Callable[..., Stream]] = [block.step for block in self._blocks]
        self._prompt_logits: Callable[..., Tensor] = self._last_logits
        self._next_logits: Callable[..., Tensor] = self._last_logits
        self._prefills_alike = self._steps_alike = False

    def compile_training(self, *, anew: bool = True) -> None:
        """Compile each block, and norm and loss, for passes with gradients; equal blocks share their code.

        Of the other passes only those of `token_losses` for callers with few shapes are compiled, each shape when it
        is first met; for decoding see `compile_decoding`.

        Args:
            anew: forget what was compiled for models of other configurations; else the caller has such a model.
        """
        if anew:
            reset_compiler(self.config)
        self._training_blocks = [torch.compile(block, dynamic=False) for block in self._blocks]
        self._training_loss = torch.compile(self._loss, dynamic=False)
        self._few_shapes_losses = torch.compile(_token_losses, dynamic=False)
        self.compiled = True

    def compile_inside(self) -> None:
        """Compile as `compile_training` does, but within each block, so that what is called around it stays outside."""
        reset_compiler()
        for block in self._blocks:
            block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
        self._training_loss = torch.compile(self._loss, dynamic=False)
        self.compiled = True

    def compile_prefill(self) -> None:
        """Compile `prefill`: norms, token shifts, rotations and sums are fused, and equal blocks share their code.

        The code works for one length of prompts, which are read whole, one batch size and one cache capacity.
        """
        reset_compiler()
        self._whole_prompts = self._prefills_alike = True
        self._block_prefills = [torch.compile(block.prefill, dynamic=False) for block in self._blocks]
        self._prompt_logits = torch.compile(self._last_logits, dynamic=False)

    def compile_decoding(self) -> None:
        """Compile `step`: a block's many small kernels become a few, and equal blocks share their code.

        The code works for any number of tokens in the caches, and for one batch size and cache capacity.
        """
        reset_compiler()
        self._block_steps = [torch.compile(block.step) for block in self._blocks]
        self._steps_alike = True
        self._next_logits = torch.compile(self._last_logits)

    def initialise(self, seed: int) -> "LanguageModel":
        """Set every parameter by its recipe, a pure function of (seed, name); return self."""
        initialise(self, self.recipe(), seed)
        return self

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Return the recipe of every parameter by its full name."""
        recipes = default_recipe(self)
        recipes["embedding.weight"] = ParameterRecipe(init=self.backbone.embedding, decay=self.backbone.embedding_decay)
        if self.positions is not None:  # as in openai/gpt-2: src/model.py
            recipes["positions.weight"] = ParameterRecipe(init=normal(0.01))
        if self.ngrams is not None:
            recipes["ngrams.table.weight"] = ParameterRecipe(init=normal(0.02), lr=self.ngrams.LR, decay=False)
        if self.head is not None:
            recipes["head.weight"] = ParameterRecipe(init=self.backbone.head)
        recipes = {name: recipe for name, recipe in recipes.items() if not name.startswith("blocks.")}
        for index, block in enumerate(self._blocks):
            recipes |= {f"blocks.{index}.{name}": recipe for name, recipe in block.recipe().items()}
        return recipes

    def hidden(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """Return the normalised final activations [B, T, D], which the head reads: the decoder's if there is one.

        Raises:
            ConfigError: no token, segments that do not fit the tokens or are given to a model with a decoder, or more
                tokens than learned positions.
        """
        blocks = self._training_blocks if torch.is_grad_enabled() else self._blocks
        return self._final(*self._stream(tokens_BT, segments_BT, blocks))

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, segments_BT: Tensor | None = None, *, auxiliary: bool = False
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss in nats per token over targets >= 0 (a scalar, float32).

        Tokens and targets are int64 [B, T]; raises ConfigError as `hidden` does.

        With `auxiliary`, in training, what `gather_auxiliary` returns comes after it: the weighted sum of the losses
        that mixers add, which is trained on too, and each of `auxiliary_losses`, [N].
        """
        training = torch.is_grad_enabled()
        blocks, loss = (self._training_blocks, self._training_loss) if training else (self._blocks, self._loss)
        found: list[dict[str, Tensor]] | None = [] if auxiliary else None
        mean = loss(*self._stream(tokens_BT, segments_BT, blocks, found), targets_BT)
        return mean if found is None else (mean, *gather_auxiliary(self._blocks, found, mean))

    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor, *, few_shapes: bool = False) -> Tensor:
        """Return the loss of every token in nats [B, T], float32, zero where the target is negative; no gradient.

        Raises ConfigError as `hidden` does.

        Args:
            tokens_BT: int64 [B, T].
            targets_BT: int64 [B, T].
            few_shapes: whether the caller has only a few shapes, so that a compiled model compiles this pass too.
        """
        blocks = self._training_blocks if few_shapes else self._blocks
        losses = self._few_shapes_losses if few_shapes else _token_losses
        with torch.no_grad():
            hidden = self._final(*self._stream(tokens_BT, None, blocks))
            return losses(hidden, self.head_weight, targets_BT)

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """Return the logits of the next token [B, T, vocab], in the parameters' dtype or autocast's.

        Tokens are int64 [B, T]; raises ConfigError as `hidden` does.
        """
        return nn.functional.linear(self.hidden(tokens_BT, segments_BT), self.head_weight)

    @property
    def backbone(self) -> Backbone:
        """The backbone by its name; as an attribute its functions could not be pickled."""
        found, eps = BACKBONES.get(self.config.backbone), self.config.eps
        return found if eps is None else replace(found, eps=eps)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [vocab, D]."""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init_cache(self, batch: int, max_length: int) -> Caches:
        """Return the empty decoding state for `batch` sequences of at most `max_length` tokens.

        Raises:
            ConfigError: more tokens than there are learned positions, or a model with a decoder.
        """
        if self.decoder is not None:
            raise ConfigError(
                "a model that decodes its answers from the last position does not predict next tokens; generate with "
                "one that is trained on text or on another task."
            )
        self._check_positions(max_length)
        caches = [block.init_cache(batch, max_length) for block in self._blocks]
        if self.ngrams is not None:
            caches[0].mixer.keep_last("ngram", self.ngrams.init_cache(batch))
        return caches

    @torch.no_grad()  # else the caches would keep the graphs of all their tokens
    def prefill(self, tokens_BT: Tensor, caches: Caches, *, hidden: bool = False) -> Tensor:
        """Read a prompt, int64 [B, T], into empty `caches`; return the logits of the token after it [B, vocab].

        A model that `continues` reads a long prompt in pieces, see `reads`, so that memory does not grow with it. With
        `hidden` the normalised activations [B, D] that the head reads are returned instead. What `prefill` and
        `step` return has no gradient.

        Raises:
            ConfigError: an empty prompt, one longer than the learned positions, or caches that have seen tokens.
        """
        refuse_filled(caches)
        return self._read(tokens_BT, None, caches, hidden=hidden)

    def _read(self, tokens_BT: Tensor, last_B: Tensor | None, caches: Caches, *, hidden: bool) -> Tensor:
        """Read tokens as `padded` returns them, more than `PIECE` of each in pieces."""
        most = max(1, self.reads(tokens_BT.shape[1])) if last_B is None else tokens_BT.shape[1]
        for piece_BT in tokens_BT.split(most, dim=1):
            x = self._embed(piece_BT, cache=caches[0].mixer)
            x, added = through(self._block_prefills, x, caches, alike=self._prefills_alike)
        return self._last_hidden(x, added, last_B) if hidden else self._prompt_logits(x, added, last_B)

    def reads(self, length: int) -> int:
        """Return how many tokens of a prompt of `length` tokens are read at once, whose activations are in memory."""
        return length if self._whole_prompts else min(length, PIECE)

    @torch.no_grad()
    def prefill_each(
        self, prompts: Sequence[Tensor], caches: Caches, *, hidden: bool = False, at_once: int = AT_ONCE
    ) -> Tensor:
        """Read prompts of any lengths, int64 [T] on any device, into empty `caches`; return the next logits [B, vocab].

        The state of each is that of the prompt alone; `choose_way` says how they are read. `step` then reads one more
        token of each, at its own position. The caches must be made for the longest prompt and what follows it.
        `[cache.take(rows) for cache in caches]` reorders, drops or repeats sequences.

        Left-padded tokens with a mask, both [B, T], are `[row[own] for row, own in zip(tokens, mask.bool())]` here.
        A pass has at most `at_once` tokens, or one prompt.

        Raises:
            ConfigError: as `prefill`, or a mixer whose decoding state changes its shape (`Cache.put`).
        """
        refuse_filled(caches)
        read, device = partial(self._read, hidden=hidden), self.embedding.weight.device
        return read_each(prompts, caches, read, device, continues=self.continues, rows=rows_of(at_once, self.reads))

    @torch.no_grad()
    def step(self, tokens_B1: Tensor, caches: Caches, *, hidden: bool = False) -> Tensor:
        """Read one more token of each sequence, int64 [B, 1]; return the logits of the token after it [B, vocab].

        Raises:
            ConfigError: no token or several, or more tokens than learned positions.
        """
        x = self._embed(tokens_B1, cache=caches[0].mixer)
        if x.shape[1] > 1:
            raise ConfigError(f"a step reads one token at a time, not {x.shape[1]}; read a prompt with prefill.")
        x, added = through(self._block_steps, x, caches, alike=self._steps_alike)
        return self._last_hidden(x, added) if hidden else self._next_logits(x, added)

    @property
    def continues(self) -> bool:
        """Whether `further` can be called: no layer needs a step for each token."""
        return all(block.continues for block in self._blocks)

    @torch.no_grad()
    def further(self, tokens_BT: Tensor, caches: Caches, rows_B: Tensor) -> Tensor:
        """Read further tokens at once, int64 [B, T]; return the normalised activations [B, T, D].

        Row b continues what sequence `rows_B[b]` has read, and the caches stay as they are. Raises ConfigError as
        `hidden` does, and for a model that does not declare `continues`.
        """
        if not self.continues:
            raise ConfigError("a layer of this model reads further tokens one by one; read them with step.")
        taken = chain([own := caches[0].take(rows_B)], (cache.take(rows_B) for cache in caches[1:]))  # one at a time
        x = self._embed(tokens_BT, cache=own.mixer)
        return self.norm(total(*through(self._block_prefills, x, taken, alike=self._prefills_alike)))

    def parameters_count(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over one sequence, the head included (multiply-add = 2)."""
        return self._output_flops(length) + sum(block.flops(length) for block in self._blocks)

    def training_flops(self, length: int) -> float:
        """Floating-point operations of one forward and backward pass over one sequence, without recomputation."""
        return 3.0 * self._output_flops(length) + sum(block.training_flops(length) for block in self._blocks)

    def state_bytes(self, length: int) -> int:
        """Bytes of decoding state per sequence of `length` tokens, in the parameters' dtype."""
        ngrams = 0 if self.ngrams is None else self.ngrams.state_bytes()
        return ngrams + sum(block.state_bytes(length) for block in self._blocks)

    def _stream(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None,
        blocks: Sequence[BlockForward],
        losses: list[dict[str, Tensor]] | None = None,
    ) -> Stream:
        """Return the activations after all blocks; auxiliary losses of each are added to `losses`, if that is given."""
        check_segments(segments_BT, tokens_BT.shape)
        check_devices({"tokens": tokens_BT, "segments": segments_BT})
        if self.decoder is not None and segments_BT is not None:
            raise ConfigError("a model with a decoder reads one sequence per row; leave out segments.")
        x, shared = self._embed(tokens_BT, segments_BT), dict[str, Tensor]()
        alike = self.compiled and blocks is self._training_blocks and not torch.is_grad_enabled()
        added = nothing_added(x) if alike and len(blocks) > 1 else None
        selective = self.checkpointing == "selective"
        recomputed = self.checkpointing and torch.is_grad_enabled() and not (selective and self.compiled)
        for block in blocks:
            given = (x, added, segments_BT, shared, losses is not None)
            if recomputed:
                kept = keep_products if selective else keep_choice
                x, added, own = checkpoint(block, *given, use_reentrant=False, context_fn=kept)
            else:
                x, added, own = block(*given)
            if losses is not None:
                losses.append(own)
        return x, added

    def _final(self, x: Tensor, added: Tensor | None) -> Tensor:
        x = total(x, added)
        return self.norm(x if self.decoder is None else self.decoder(x))

    def _output_flops(self, length: int) -> float:
        head = 2.0 * length * self.config.vocab * self.config.hidden
        return head if self.decoder is None else head + self.decoder.flops(length)

    def _loss(self, x: Tensor, added: Tensor | None, targets: Tensor) -> Tensor:
        return linear_cross_entropy(self._final(x, added), self.head_weight, targets)

    def _last_hidden(self, x: Tensor, added: Tensor | None, last_B: Tensor | None = None) -> Tensor:
        return self.norm(ends_of(total(x, added), last_B))

    def _last_logits(self, x: Tensor, added: Tensor | None, last_B: Tensor | None = None) -> Tensor:
        return nn.functional.linear(self._last_hidden(x, added, last_B), self.head_weight)

    def _check_positions(self, length: int) -> None:
        if self.positions is not None and length > self.config.max_length:
            raise ConfigError(
                f"learned positions end at {self.config.max_length} tokens; take at most that many, not {length}."
            )

    def _embed(self, tokens: Tensor, segments: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ConfigError(f"tokens {tuple(tokens.shape)} must be [B, T] with at least one token.")
        x = self.embedding(tokens)
        if self.positions is not None:
            end = tokens.shape[1] + (0 if cache is None else cache.length)
            positions = torch.arange(tokens.shape[1], device=tokens.device) + (0 if cache is None else cache.start)
            if segments is not None:
                positions = positions_of(segments)
                # A row may be longer than each of its segments; otherwise no synchronisation with the GPU is needed.
                end = end if end <= self.config.max_length else int(positions.max()) + 1
            self._check_positions(end)
            x = x + self.positions(positions)
        if self.ngrams is not None:
            x = x + self.ngrams(tokens, segments, None if cache is None else cache.tensors["ngram"])
        return x if self.embedding_norm is None else self.embedding_norm(x)


def _token_losses(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    return linear_cross_entropy(hidden_BTD, weight_VD, targets_BT, reduction="none")


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Return an uninitialised embedding: drawing values on "meta" would import the compiler of PyTorch."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)

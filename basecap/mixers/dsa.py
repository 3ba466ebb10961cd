"""DeepSeek Sparse Attention (arXiv 2512.02556): attention to the tokens that a small indexer chooses for each query."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers._attention import HeadedMixer, HeadsConfig, refuse_more
from basecap.mixers._contract import Cache, Variant, mixer
from basecap.mixers._further import Further
from basecap.mixers._parts import positions_of, remember, rotary
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe
from basecap.ops import Influence
from basecap.ops.attention import attention_step
from basecap.ops.selected_attention import influence, selected_attention
from basecap.ops.token_choice import best, choose_by_index, choose_by_mass, index_divergence, index_scores, mass

#: Index queries [B, T, I, J], one index key per token [B, T, J], weights of the heads [B, T, I].
Index = tuple[Tensor, Tensor, Tensor]


@mixer(
    "dsa",
    backbone="transformer++",
    paper="arXiv 2512.02556",
    summary="attention to the 64 tokens that an indexer chooses; a loss of its own teaches it attention's mass",
    source="huggingface/transformers@v5.24.0: src/transformers/models/deepseek_v32/modular_deepseek_v32.py for the "
    "indexer; for the rest our choice, as for transformer++",
    differences=(
        "No first stage of full attention: attention reads the chosen tokens from the start, while the indexer learns "
        "the mass over all tokens that a query sees, as in that stage. With `mixer: {target: chosen}` it learns from "
        "the chosen tokens alone, as in the second stage.",
        "For models of 100M parameters: 64 of 2,048 tokens, and an indexer with 4 heads of 64. DeepSeek-V3.2 reads "
        "2,048 of 131,072 tokens and has 64 heads of 128.",
        "Queries of the indexer are projected from the input, as there are no compressed queries; its keys and queries "
        "are not rotated by a Hadamard matrix, which only serves 8-bit numbers.",
    ),
    variants={
        "dsa by mass": Variant(
            options={"selector": "mass"},
            summary="the same number of tokens, chosen by the attention's mass itself, without an indexer",
            paper="arXiv 2512.02556, arXiv 2505.18522 (selection by mass)",
        ),
    },
)
class DSA(HeadedMixer):
    """Multi-head causal attention to the same few tokens for all heads of a query.

    The choice has no gradient. The indexer learns by a loss of its own, the divergence of its scores from the attention
    of all heads together. That loss changes the indexer alone, and the model's loss does not change it.
    """

    takes_lengths = True
    continues = True
    tiny: ClassVar = {"heads": 2, "top": 12}

    class Config(HeadsConfig):
        """Options of DeepSeek Sparse Attention."""

        position: Literal["rope", "none"] = "rope"
        top: int = Field(64, ge=1, description="tokens that a query reads")
        selector: Literal["indexer", "mass"] = Field(
            "indexer", description="what chooses: indexer, or attention's mass"
        )
        index_heads: int = Field(4, ge=1, description="heads of the indexer")
        index_dim: int = Field(64, ge=4, multiple_of=4, description="size of its heads; RoPE rotates half of it")
        target: Literal["visible", "chosen"] = Field("visible", description="tokens over which the indexer learns")
        index_weight: float = Field(1.0, gt=0, description="weight of its loss, which matters for clipping only")

    def __init__(self, config: Config, layer: LayerSpec):
        refuse_more(config, "top", layer.max_length, "tokens", layer.max_length)
        indexed, D = config.selector == "indexer", layer.hidden
        unused = [name for name in config.model_fields_set if name.startswith("index_") or name == "target"]
        if unused and not indexed:
            raise ConfigError(
                f"{min(unused)} is an option of the indexer, and with selector: mass there is none; leave it out."
            )
        super().__init__(config, layer, norm="none")
        self.index_q = nn.Linear(D, config.index_heads * config.index_dim, bias=False) if indexed else None
        self.index_k = nn.Linear(D, config.index_dim, bias=False) if indexed else None
        self.index_norm = nn.LayerNorm(config.index_dim, eps=1e-6) if indexed else None
        self.index_weights = nn.Linear(D, config.index_heads, bias=False) if indexed else None

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """The divergence of the indexer."""
        return {} if self.index_q is None else {"indexer": self.config.index_weight}

    def _index(self, x_BTD: Tensor, segments: Tensor | None = None, start: int | Tensor = 0) -> Index | None:
        """Return the indexer's queries, keys and weights, from inputs that learn nothing of it; None without one."""
        if self.index_q is None or self.index_k is None or self.index_norm is None or self.index_weights is None:
            return None
        c, x = self.config, x_BTD.detach()
        positions = start + torch.arange(x.shape[1], device=x.device) if segments is None else positions_of(segments)
        half = c.index_dim // 2
        q = rotary(self.index_q(x).unflatten(-1, (c.index_heads, -1)), positions, c.rope_base, half)
        k = rotary(self.index_norm(self.index_k(x))[:, :, None], positions, c.rope_base, half)[:, :, 0]
        return q, k.to(q.dtype), self.index_weights(x) * (c.index_heads * c.index_dim) ** -0.5

    def _chosen(self, index: Index | None, q: Tensor, k: Tensor, segments: Tensor | None) -> Tensor:
        """Return bool [B, T, 1, T], the tokens that each query reads."""
        top = self.config.top
        if index is None:
            return choose_by_mass(q, k, top, segments=segments)[:, :, None]
        return choose_by_index(*index, top, segments=segments)[:, :, None]

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None, losses: dict[str, Tensor] | None = None) -> Tensor:
        """Choose and attend; see `Mixer.forward`."""
        q, k, v = self.project(x_BTD, segments)
        index = self._index(x_BTD, segments)
        chosen = self._chosen(index, q, k, segments)
        if losses is not None and index is not None:
            target = chosen[:, :, 0] if self.config.target == "chosen" else None
            losses["indexer"] = index_divergence(*index, q, k, chosen_BTT=target, segments=segments)
        return self.finish(selected_attention(q, k, v, chosen, numbers(q), segments=segments), x_BTD)

    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Choose and attend; see `HeadedMixer.attend`."""
        chosen = self._chosen(self._index(x_BTD, segments), q, k, segments)
        return selected_attention(q, k, v, chosen, numbers(q), segments=segments)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution, zero at tokens that are not chosen."""
        q, k, _ = self.project(x_BTD)
        return influence(q, k, self._chosen(self._index(x_BTD), q, k, None), numbers(q))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values [B, max_length, G, K], and the indexer's keys [B, max_length, J]."""
        cache = self.project.init_cache(batch, max_length)
        if self.index_q is not None:
            cache.tensors["index_k"] = self.out.weight.new_zeros(batch, max_length, self.config.index_dim)
        return cache

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend over a whole prompt, or more of it, and keep its keys and values, and the indexer's keys."""
        if cache.length:
            return self._extend(x_BTD, cache)
        index = self._index(x_BTD)
        if index is not None:
            cache.tensors["index_k"][:, : x_BTD.shape[1]] = index[1]
        return super().prefill(x_BTD, cache)

    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append to the cache; see `HeadedMixer.store`."""
        remember(cache, {"k": k, "v": v})

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token to the chosen ones."""
        return self._extend(x_B1D, cache)

    def _extend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens, a few of them one after the other, with one projection of all."""
        start, tensors = cache.start, cache.tensors
        further = Further(cache, x_BTD) if Further.at_once(cache, x_BTD) else None
        q, k, v = self.project(x_BTD, start=start, last=tensors.get("canon"))
        index = self._index(x_BTD, start=start)
        remember(cache, {"k": k, "v": v} if index is None else {"k": k, "v": v, "index_k": index[1]})
        if further is not None:
            return self.finish(self._attend_at_once(index, q, tensors, further), x_BTD)
        outputs = []
        for t, q_B1HK in enumerate(q.split(1, dim=1)):
            now = slice(t, t + 1)
            own = None if index is None else (index[0][:, now], tensors["index_k"].to(index[1].dtype), index[2][:, now])
            outputs.append(self._look_up(own, q_B1HK, tensors, start + t))
        return self.finish(torch.cat(outputs, dim=1), x_BTD)

    def _attend_at_once(self, index: Index | None, q: Tensor, tensors: dict[str, Tensor], further: Further) -> Tensor:
        """Return what the queries [B, T, H, K] of further tokens read of a cache that has them."""
        queries, (k, v) = further.spread(q), (tensors[name][:, : further.length].to(q.dtype) for name in ("k", "v"))
        if index is not None:
            index_k = tensors["index_k"][:, : further.length].to(index[1].dtype)
            index = (further.spread(index[0]), index_k, further.spread(index[2]))
        chosen = self._chosen(index, queries, k, None)
        return further.pick(selected_attention(queries, k, v, chosen, numbers(queries)))

    def _look_up(self, own: Index | None, q: Tensor, tensors: dict[str, Tensor], start: int | Tensor) -> Tensor:
        """Return what the queries [B, 1, H, K] at positions `start` read of a cache, which may have later tokens."""
        seen = (torch.arange(tensors["k"].shape[1], device=q.device)[None] <= start)[:, None].expand(len(q), -1, -1)
        scores = mass(q, tensors["k"].to(q.dtype), seen) if own is None else index_scores(*own)
        chosen = best(scores, seen, self.config.top)[:, 0]
        # The chosen tokens, and where there are fewer, others that are not read.
        read, place = chosen.to(torch.int8).topk(min(self.config.top, chosen.shape[1]), dim=-1)
        row = torch.arange(len(q), device=q.device)[:, None]
        k, v = (tensors[name][row, place].to(q.dtype) for name in ("k", "v"))
        return attention_step(q, k, v, visible_BS=read > 0)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """As transformer++; the indexer's matrices normal(0.02), its norm 1 and 0."""
        names = ("index_q", "index_k", "index_norm", "index_weights")
        parts = {name: part for name, part in self.named_children() if name in names}
        own = {f"{name}.{key}": recipe for name, part in parts.items() for key, recipe in default_recipe(part).items()}
        return super().recipe() | own

    def _read(self, length: int) -> float:
        """Return how many pairs of a query and a chosen token there are."""
        W = min(self.config.top, length)
        return W * (W + 1) / 2 + (length - W) * W

    def _indexing(self, length: int, pairs: float) -> tuple[float, float]:
        """Return the operations of the indexer's projections, and of its scores of so many pairs; 0 without one."""
        if self.index_q is None:
            return 0.0, 0.0
        heads, J = self.config.index_heads, self.config.index_dim
        return 2.0 * length * self.layer.hidden * (heads * J + J + heads), 2.0 * pairs * heads * (J + 1)

    def _attending(self, length: int) -> float:
        return self.projection_flops(length) + 4.0 * self._read(length) * self.layer.hidden

    def flops(self, length: int) -> float:
        """Projections, scores of all tokens (of the indexer, or of attention), and attention to the chosen ones."""
        pairs = length * (length + 1.0) / 2
        choosing = 2.0 * pairs * self.layer.hidden if self.index_q is None else sum(self._indexing(length, pairs))
        return choosing + self._attending(length)

    def training_flops(self, length: int) -> float:
        """The choice once, attention three times; of the indexer's loss the mass once and the scores three times.

        The indexer's projections count twice, because its input has no gradient.
        """
        pairs = length * (length + 1.0) / 2
        if self.index_q is None:
            return 2.0 * pairs * self.layer.hidden + 3.0 * self._attending(length)
        projections, choosing = self._indexing(length, pairs)
        learned = pairs if self.config.target == "visible" else self._read(length)
        loss = 2.0 * learned * self.layer.hidden + 3.0 * self._indexing(length, learned)[1]
        return 2.0 * projections + choosing + loss + 3.0 * self._attending(length)

    def state_bytes(self, length: int) -> int:
        """Keys and values of every token, and the indexer's keys."""
        index = 0 if self.index_q is None else length * self.config.index_dim * self.out.weight.element_size()
        return self.project.state_bytes(length) + index


def numbers(q_BTHK: Tensor) -> Tensor:
    """Return the block of each token, itself: int64 [B, T]."""
    return torch.arange(q_BTHK.shape[1], device=q_BTHK.device).expand(q_BTHK.shape[:2])

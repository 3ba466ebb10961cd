"""DeepSeek Sparse Attention (arXiv 2512.02556): attention to the tokens that a small indexer chooses for each query."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from basecap.errors import ConfigError
from basecap.mixers._attention import HeadedMixer, HeadsConfig, refuse_more
from basecap.mixers._contract import Cache, Variant, mixer
from basecap.mixers._parts import positions_of, remember, rotary
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe
from basecap.ops import Influence, without_autocast
from basecap.ops.attention import attention_step
from basecap.ops.selected_attention import influence, selected_attention

#: Queries that are scored at once: scores of all pairs of tokens would not fit in memory.
QUERIES = 128

#: Index queries [B, T, I, J], one index key per token [B, T, J], weights of the heads [B, T, I].
Index = tuple[Tensor, Tensor, Tensor]


def index_scores(q_BQIJ: Tensor, k_BSJ: Tensor, weights_BQI: Tensor) -> Tensor:
    """Return sum_i w_i ReLU(q_i.k) [B, Q, S], in float32 or wider (arXiv 2512.02556, eq. 1)."""
    wide = torch.promote_types(q_BQIJ.dtype, torch.float32)
    q, k, weights = (x.to(wide) for x in (q_BQIJ, k_BSJ, weights_BQI))
    with without_autocast(q.device):
        return torch.einsum("bqis,bqi->bqs", torch.einsum("bqij,bsj->bqis", q, k).relu(), weights)


@torch.no_grad()
def mass(q_BQHK: Tensor, k_BSGK: Tensor, seen_BQS: Tensor) -> Tensor:
    """Return the mean attention distribution of the heads over what a query sees [B, Q, S], in float32 or wider."""
    wide = torch.promote_types(q_BQHK.dtype, torch.float32)
    q, k = q_BQHK.to(wide).unflatten(2, (k_BSGK.shape[2], -1)) * q_BQHK.shape[3] ** -0.5, k_BSGK.to(wide)
    with without_autocast(q.device):
        scores = torch.einsum("bqgrk,bsgk->bgrqs", q, k)
    return scores.masked_fill(~seen_BQS[:, None, None], float("-inf")).softmax(-1).mean((1, 2))


@torch.no_grad()
def best(scores_BQS: Tensor, seen_BQS: Tensor, top: int) -> Tensor:
    """Return bool [B, Q, S]: the `top` tokens with the largest scores of those seen; of equal ones the latest."""
    scores = scores_BQS.masked_fill(~seen_BQS, float("-inf"))
    count = min(top, scores.shape[-1])
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, (scores == least) & seen_BQS
    later = equal.flip(-1).cumsum(-1).flip(-1)
    return above | (equal & (later <= count - above.sum(-1, keepdim=True)))


def seen_by(now: slice, T: int, segments: Tensor | None, device: torch.device) -> Tensor:
    """Return bool [B or 1, Q, S], what the queries of `now` see of the tokens up to its end."""
    s = torch.arange(min(now.stop, T), device=device)
    seen = (s[now, None] >= s)[None]
    return seen if segments is None else seen & (segments[:, now, None] == segments[:, None, : now.stop])


def divergence(index: Index, q_BQHK: Tensor, k_BSGK: Tensor, seen_BQS: Tensor) -> Tensor:
    """Return the sum over queries of KL(mass || softmax of the index scores), eqs. 3 and 4; only the index learns."""
    target = mass(q_BQHK, k_BSGK, seen_BQS)
    logarithms = index_scores(*index).masked_fill(~seen_BQS, float("-inf")).log_softmax(-1)
    return (torch.xlogy(target, target) - target * logarithms.masked_fill(~seen_BQS, 0.0)).sum()


def blocks_of(T: int) -> list[slice]:
    """Return the queries that are scored at once."""
    return [slice(first, min(first + QUERIES, T)) for first in range(0, T, QUERIES)]


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

    def _scores(self, index: Index | None, q_BQHK: Tensor, k_BSGK: Tensor, seen_BQS: Tensor) -> Tensor:
        """Return what tokens are chosen by [B, Q, S]."""
        return mass(q_BQHK, k_BSGK, seen_BQS) if index is None else index_scores(*index)

    @torch.no_grad()
    def _chosen(self, index: Index | None, q: Tensor, k: Tensor, segments: Tensor | None) -> Tensor:
        """Return bool [B, T, 1, T], the tokens that each query reads."""
        T, parts = q.shape[1], []
        for now in blocks_of(T):
            seen = seen_by(now, T, segments, q.device).expand(len(q), -1, -1)
            own = None if index is None else (index[0][:, now], index[1][:, : now.stop], index[2][:, now])
            scores = self._scores(own, q[:, now], k[:, : now.stop], seen)
            parts.append(F.pad(best(scores, seen, self.config.top), (0, T - now.stop)))
        return torch.cat(parts, dim=1)[:, :, None]

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None, losses: dict[str, Tensor] | None = None) -> Tensor:
        """Choose and attend; see `Mixer.forward`."""
        q, k, v = self.project(x_BTD, segments)
        index = self._index(x_BTD, segments)
        chosen = self._chosen(index, q, k, segments)
        if losses is not None and index is not None:
            losses["indexer"] = self._divergence(index, q.detach(), k.detach(), chosen, segments)
        return self.finish(selected_attention(q, k, v, chosen, numbers(q), segments=segments), x_BTD)

    def _divergence(self, index: Index, q: Tensor, k: Tensor, chosen: Tensor, segments: Tensor | None) -> Tensor:
        """Return the mean divergence per token; scores of each block are made again in the backward pass."""
        B, T = q.shape[:2]
        total = q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32))
        for now in blocks_of(T):
            seen = seen_by(now, T, segments, q.device).expand(B, -1, -1)
            if self.config.target == "chosen":
                seen = chosen[:, now, 0, : now.stop]
            own = index[0][:, now], index[1][:, : now.stop], index[2][:, now]
            given = (own, q[:, now], k[:, : now.stop], seen)
            if torch.compiler.is_compiling():
                total = total + divergence(*given)
            else:
                total = total + checkpoint(divergence, *given, use_reentrant=False, preserve_rng_state=False)
        return total / max(1, B * T)

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
        """Attend from further tokens one after the other, with one projection of all."""
        start, tensors = cache.start, cache.tensors
        q, k, v = self.project(x_BTD, start=start, last=tensors.get("canon"))
        index = self._index(x_BTD, start=start)
        remember(cache, {"k": k, "v": v} if index is None else {"k": k, "v": v, "index_k": index[1]})
        outputs = []
        for t, q_B1HK in enumerate(q.split(1, dim=1)):
            now = slice(t, t + 1)
            own = None if index is None else (index[0][:, now], tensors["index_k"].to(index[1].dtype), index[2][:, now])
            outputs.append(self._look_up(own, q_B1HK, tensors, start + t))
        return self.finish(torch.cat(outputs, dim=1), x_BTD)

    def _look_up(self, own: Index | None, q: Tensor, tensors: dict[str, Tensor], start: int | Tensor) -> Tensor:
        """Return what the queries [B, 1, H, K] at positions `start` read of a cache, which may have later tokens."""
        seen = (torch.arange(tensors["k"].shape[1], device=q.device)[None] <= start)[:, None].expand(len(q), -1, -1)
        chosen = best(self._scores(own, q, tensors["k"].to(q.dtype), seen), seen, self.config.top)[:, 0]
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

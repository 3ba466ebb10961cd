"""Top-1 chunk selection: attention to the own chunk of tokens and to the best earlier chunk."""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from basecap.mixers._attention import SelectionConfig, StepwiseMixer, refuse_more
from basecap.mixers._contract import Cache, Variant, mixer
from basecap.mixers._further import TOKENS_OF_A_STEP
from basecap.mixers._recipes import LayerSpec
from basecap.ops import Influence
from basecap.ops.top1_chunk import (
    influence,
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_fill,
    top1_chunk_further,
    top1_chunk_step,
)


@mixer(
    "top1-chunk-exact",
    backbone="transformer++",
    paper="arXiv 2505.18522, section 5",
    summary="attention to the own chunk and the earlier one with the largest attention mass",
    source="our choice: the authors publish no code and name no initial values",
    differences=("Everything starts as in transformer++, so that only the selection differs.",),
    options={"mode": "exact"},
    variants={
        "top1-chunk-approx": Variant(
            options={"mode": "approx"},
            summary="attention to the own chunk and the earlier one with the best mean key",
        ),
        "top1-chunk-exact canon": Variant(
            options={"mode": "exact"},
            canon="abcd",
            summary="top1-chunk-exact with Canon layers at all four places",
            paper="arXiv 2505.18522, ssrn 5240330 (Canon layers)",
        ),
    },
)
class Top1Chunk(StepwiseMixer):
    """Multi-head causal attention to two chunks per query: its own up to itself, and a whole earlier one.

    Queries and keys are normalised per head, then rotated. The choice has no gradient.
    """

    class Config(SelectionConfig):
        """Options of Top-1 chunk selection."""

        mode: Literal["exact", "approx"] = Field("exact", description="how a chunk is scored: by mass or by mean key")
        chunk: Literal[16, 32, 64, 128, 256] = Field(128, description="tokens per chunk")
        remote: int = Field(1, ge=1, description="earlier chunks that a query attends")

    def __init__(self, config: Config, layer: LayerSpec):
        earlier = max(1, (layer.max_length - 1) // config.chunk)
        refuse_more(config, "remote", earlier, f"earlier chunks of {config.chunk}", layer.max_length)
        super().__init__(config, layer, norm="gain" if config.qk_gain else "plain")

    @property
    def _options(self) -> dict[str, Any]:
        """What all functions of the op take that attend."""
        c = self.config
        return {"chunk": c.chunk, "mode": c.mode, "remote": c.remote}

    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend to the chunks; see `HeadedMixer.attend`."""
        return top1_chunk(q, k, v, segments=segments, **self._options)

    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append to the cache; see `HeadedMixer.store`."""
        top1_chunk_fill(k, v, cache.tensors, cache.length, lengths=cache.lengths, chunk=self.config.chunk)
        cache.length += k.shape[1]

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values of every token, [B, max_length, G, K] each, and the sum of each chunk's keys."""
        p, weight = self.project, self.out.weight
        tensors = top1_chunk_cache(
            batch, max_length, p.groups, p.dim, chunk=self.config.chunk, dtype=weight.dtype, device=weight.device
        )
        return p.cache_of(tensors)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        """Attend from one more token; see `StepwiseMixer.attend_next`."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        return top1_chunk_step(q, k, v, cache.tensors, cache.length, lengths=lengths, **self._options)

    def at_once(self, x_BTD: Tensor, cache: Cache) -> bool:
        """Return whether further tokens attend at once; a few do on every device, see `attend_at_once`."""
        T = x_BTD.shape[1]
        few = 1 < T <= self.config.chunk and cache.length + T <= TOKENS_OF_A_STEP * T
        return few or super().at_once(x_BTD, cache)

    def attend_at_once(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens; see `HeadedMixer.attend_at_once`.

        Up to as many as a chunk has make fewer scores with all keys than all tokens do with those of their own chunks.
        """
        if q.shape[1] > self.config.chunk:
            return super().attend_at_once(x_BTD, q, k, v, cache)
        o = top1_chunk_further(q, k, v, cache.tensors, cache.length, lengths=cache.lengths, **self._options)
        cache.length += q.shape[1]
        return o

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the attention distribution, zero outside the two chunks."""
        q, k, _ = self.project(x_BTD)
        return influence(q, k, **self._options)

    def flops(self, length: int) -> float:
        """Projections, the scores of all keys (exact) or all mean keys (approx), and attention to the chunks seen.

        The scores of all keys include those of the chosen chunks.
        """
        return self._choosing(length) + self._attending(length)

    def training_flops(self, length: int) -> float:
        """The choice once, because it has no gradient, and three times the rest."""
        return self._choosing(length) + 3.0 * self._attending(length)

    def _places(self, length: int) -> tuple[int, int, float]:
        """Return sums over queries: the chunks before their own, the chosen chunks, the visible own tokens."""
        C = self.config.chunk
        full, rest = divmod(length, C)
        queries = [C] * full + [rest]
        earlier = sum(count * c for c, count in enumerate(queries))
        chosen = sum(count * min(c, self.config.remote) for c, count in enumerate(queries))
        return earlier, chosen, sum(count * (count + 1) / 2 for count in queries)

    def _choosing(self, length: int) -> float:
        earlier, chosen, _ = self._places(length)
        scores = (earlier - chosen) * self.config.chunk if self.config.mode == "exact" else earlier
        return 2.0 * scores * self.layer.hidden

    def _attending(self, length: int) -> float:
        _, chosen, own = self._places(length)
        return self.projection_flops(length) + 4.0 * (chosen * self.config.chunk + own) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Keys and values of every token, and the sums, which are float32 or wider."""
        wide = torch.promote_types(self.out.weight.dtype, torch.float32).itemsize
        chunks = -(-length // self.config.chunk)
        return self.project.state_bytes(length) + chunks * self.project.groups * self.project.dim * wide

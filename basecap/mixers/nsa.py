"""Native Sparse Attention (arXiv 2502.11089): attention to compressed and to selected blocks and to a window."""

from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._attention import HeadedMixer, HeadsConfig, refuse_more
from basecap.mixers._contract import Cache, mixer
from basecap.mixers._delta import REPOSITORY
from basecap.mixers._further import Further
from basecap.mixers._parts import positions_of, remember
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe
from basecap.ops import Influence, without_autocast
from basecap.ops.attention import attention, attention_step
from basecap.ops.attention import influence as window_influence
from basecap.ops.selected_attention import influence as selected_influence
from basecap.ops.selected_attention import selected_attention


class Blocks(NamedTuple):
    """The blocks of every sequence, from its start.

    Attributes:
        own_BT: int64, the number of each token's block in its sequence.
        most: M, at least the number of blocks of any sequence.
        last_BM: int64, the last token of each whole block of a row, T where there are fewer.
        reads_BTM: bool, whether the m-th whole block of a row is of the token's past.
        number_BM: int64, the number of each whole block in its sequence; None if that is m.
    """

    own_BT: Tensor
    most: int
    last_BM: Tensor
    reads_BTM: Tensor
    number_BM: Tensor | None


def cut(x_BTD: Tensor, segments: Tensor | None, block: int) -> Blocks:
    """Return the blocks of `block` tokens, a power of two, of every sequence."""
    (B, T, _), shift = x_BTD.shape, block.bit_length() - 1
    t = torch.arange(T, device=x_BTD.device)
    if segments is None:
        last = (t[: T // block] * block + block - 1).expand(B, -1)
        return Blocks((t >> shift).expand(B, T), -(-T // block), last, last[:, None] <= t[:, None], None)
    position = positions_of(segments)
    closes = (position & (block - 1)) == block - 1
    last = torch.where(closes, t, T).sort(-1).values[:, : T // block]
    whole, inside = last < T, last.clamp(max=T - 1)
    same = segments.gather(1, inside)[:, None] == segments[:, :, None]
    number = torch.where(whole, position.gather(1, inside) >> shift, -1)
    return Blocks(position >> shift, -(-T // block), last, (last[:, None] <= t[:, None]) & same, number)


def members(blocks: Blocks, block: int) -> Tensor:
    """Return float32 [B, M, T], the share of each token in the mean of a whole block."""
    t = torch.arange(blocks.own_BT.shape[1], device=blocks.own_BT.device)
    last = blocks.last_BM[..., None]
    return ((t <= last) & (t > last - block)).float() / block


def means(x_BTGK: Tensor, blocks: Blocks, block: int) -> Tensor:
    """Return the means of the whole blocks [B, M, G, K], in float32 or wider."""
    wide = x_BTGK.to(torch.promote_types(x_BTGK.dtype, torch.float32))
    if blocks.number_BM is None:
        whole = wide.shape[1] // block
        return wide[:, : whole * block].unflatten(1, (whole, block)).mean(2)
    with without_autocast(wide.device):
        return torch.einsum("bmt,btgk->bmgk", members(blocks, block).to(wide.dtype), wide)


def read_means(q_BTHK: Tensor, k_BMGK: Tensor, reads_BTM: Tensor) -> Tensor:
    """Return the weights of the blocks' means [B, T, G, H/G, M], in float32 or wider; 0 where a query reads none."""
    G, K = k_BMGK.shape[2:]
    q = q_BTHK.to(k_BMGK.dtype).unflatten(2, (G, -1)) * K**-0.5
    with without_autocast(q.device):
        scores = torch.einsum("btgrk,bmgk->btgrm", q, k_BMGK)
    reads = reads_BTM[:, :, None, None]
    return scores.masked_fill(~reads, torch.finfo(scores.dtype).min).softmax(-1) * reads


@torch.no_grad()
def choose(weights_BTGM: Tensor, own_BT: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the `top` best blocks [B, T, G, top], int64, and whether the query has so many before it, bool.

    The own block, the one before it and the first are among them; ties go to the earlier block.
    """
    m = torch.arange(weights_BTGM.shape[3], device=own_BT.device)
    own = own_BT[:, :, None, None]
    forced = (m == own) | (m == own - 1) | (m == 0)
    scores = weights_BTGM.masked_fill(forced, float("inf")).masked_fill(m > own, -1.0)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    return best, best <= own


@mixer(
    "nsa",
    backbone="swiglu",
    paper="arXiv 2502.11089",
    summary="attention to the means of blocks, to the best whole blocks and to a window, gated per head",
    source=f"{REPOSITORY}: fla/layers/nsa.py, fla/models/nsa/modeling_nsa.py, fla/ops/nsa/naive.py",
    differences=(
        "A block is summarised by the means of its keys and of its values, as in fla's code; in the paper a learned "
        "network summarises overlapping blocks.",
        "For sequences of 2,048 tokens: blocks of 32, the best 8 of them and a window of 128. They are an eighth and a "
        "sixteenth of the sequence, as the paper's 64, 16 and 512 are of its 8,192, in finer blocks.",
        "Every head has its own keys and values and chooses its own blocks, so a model is as large as with plain "
        "attention. In the official models 16 heads share them, as kernels need; here `mixer: {kv_heads: 4}` lets "
        "heads share them.",
    ),
)
class NSA(HeadedMixer):
    """Three kinds of attention with the same queries, keys and values, each times a gate per head and token.

    Compressed: to the means of keys and values of each whole block of the past. Selected: to all tokens of the blocks
    with the largest weights there, summed over the heads that share keys. Window: to the last tokens. The choice has no
    gradient; its scores learn by the compressed attention.
    """

    takes_lengths = True
    continues = True
    tiny: ClassVar = {"heads": 2, "block": 4, "top": 4, "window": 16}

    class Config(HeadsConfig):
        """Options of Native Sparse Attention."""

        position: Literal["rope", "none"] = "rope"
        block: Literal[4, 8, 16, 32, 64, 128] = Field(32, description="tokens per block")
        top: int = Field(8, ge=3, description="blocks that a query reads whole: first, own, the one before, the best")
        window: int = Field(128, ge=1, description="tokens the window has, the query's own included")

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 32}}

    def __init__(self, config: Config, layer: LayerSpec):
        blocks = -(-layer.max_length // config.block)
        refuse_more(config, "top", blocks, f"blocks of {config.block}", layer.max_length)
        super().__init__(config, layer, norm="none")
        self.branches = nn.Linear(layer.hidden, 3 * self.project.heads, bias=False)

    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Attend in the three ways and add; see `HeadedMixer.attend`."""
        c = self.config
        blocks = cut(x_BTD, segments, c.block)
        weights = read_means(q, means(k, blocks, c.block), blocks.reads_BTM)
        compressed = self._mix(weights, means(v, blocks, c.block)).to(q.dtype)
        selected = selected_attention(q, k, v, self._chosen(weights, blocks), blocks.own_BT, segments=segments)
        windowed = attention(q, k, v, window=c.window, segments=segments)
        return self._gated(x_BTD, compressed, selected, windowed)

    @staticmethod
    def _mix(weights_BTGRM: Tensor, v_BMGV: Tensor) -> Tensor:
        with without_autocast(v_BMGV.device):
            return torch.einsum("btgrm,bmgv->btgrv", weights_BTGRM, v_BMGV).flatten(2, 3)

    def _chosen(self, weights_BTGRM: Tensor, blocks: Blocks) -> Tensor:
        """Return bool [B, T, G, M], the blocks that each group of heads reads whole."""
        weights = weights_BTGRM.detach().sum(3)
        if blocks.number_BM is None:
            weights = F.pad(weights, (0, blocks.most - weights.shape[3]))
        else:  # from the blocks of a row to those of a sequence; others weigh nothing
            own = blocks.number_BM[..., None] == torch.arange(blocks.most, device=weights.device)
            with without_autocast(weights.device):
                weights = torch.einsum("btgm,bmn->btgn", weights, own.to(weights.dtype))
        best, exists = choose(weights, blocks.own_BT, self.config.top)
        return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, best, exists)

    def _gated(self, x_BTD: Tensor, compressed: Tensor, selected: Tensor, windowed: Tensor) -> Tensor:
        gates = self._gates(x_BTD).to(selected.dtype)[..., None].unbind(-2)
        return gates[0] * compressed.to(selected.dtype) + gates[1] * selected + gates[2] * windowed

    def _gates(self, x_BTD: Tensor) -> Tensor:
        """Return [B, T, H, 3], for compressed blocks, selected blocks and the window."""
        return self.branches(x_BTD).sigmoid().unflatten(-1, (-1, 3))

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return the three distributions over tokens, each times its gate."""
        c, (q, k, _) = self.config, self.project(x_BTD)
        blocks = cut(x_BTD, None, c.block)
        weights = read_means(q, means(k, blocks, c.block), blocks.reads_BTM)
        chosen, share = self._chosen(weights, blocks), members(blocks, c.block).to(weights.dtype)
        selected = selected_influence(q, k, chosen, blocks.own_BT)
        windowed = window_influence(q, k, window=c.window)
        gates_BHT3 = self._gates(x_BTD).to(weights.dtype).transpose(1, 2)

        def factors(heads: slice) -> Tensor:
            compressed = weights.flatten(2, 3)[:, :, heads].transpose(1, 2) @ share[:, None]
            parts = (compressed, selected.factors(heads), windowed.factors(heads))
            return sum(
                (gates_BHT3[:, heads, :, i, None] * part for i, part in enumerate(parts)), torch.zeros_like(compressed)
            )

        return Influence(shape=selected.shape, device=q.device, factors=factors)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values [B, max_length, G, K], and their means over blocks [B, blocks, G, K], float32 or wider."""
        cache = self.project.init_cache(batch, max_length)
        shape = (batch, -(-max_length // self.config.block), self.project.groups, self.project.dim)
        wide = torch.promote_types(self.out.weight.dtype, torch.float32)
        cache.tensors |= {name: self.out.weight.new_zeros(shape, dtype=wide) for name in ("mean_k", "mean_v")}
        return cache

    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append to the cache; see `HeadedMixer.store`."""
        remember(cache, {"k": k, "v": v})
        for name in ("k", "v"):  # right for blocks that are whole in their sequence, and others are not read
            held = cache.tensors[name][:, : cache.length]
            blocks = cut(held.flatten(2), None, self.config.block)
            cache.tensors[f"mean_{name}"][:, : blocks.last_BM.shape[1]] = means(held, blocks, self.config.block)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Attend from one more token."""
        return self._extend(x_B1D, cache)

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt, or more of it, and keep its keys and values."""
        return self._extend(x_BTD, cache) if cache.length else super().prefill(x_BTD, cache)

    def _extend(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Attend from further tokens, a few of them one after the other, with one projection of all."""
        start = cache.start
        q, k, v = self.project(x_BTD, start=start, last=cache.tensors.get("canon"))
        if Further.at_once(cache, x_BTD):
            return self.finish(self.attend_at_once(x_BTD, q, k, v, cache), x_BTD)
        t_B1 = start if isinstance(start, Tensor) else torch.full((len(q), 1), start, device=q.device)
        remember(cache, {"k": k, "v": v})
        read = [self._read(q_B1HK, cache.tensors, t_B1 + t) for t, q_B1HK in enumerate(q.split(1, dim=1))]
        return self.finish(self._gated(x_BTD, *(torch.cat(kind, dim=1) for kind in zip(*read, strict=True))), x_BTD)

    def _read(self, q: Tensor, tensors: dict[str, Tensor], t_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the queries [B, 1, H, K] at positions t read of a cache, compressed, selected and windowed.

        The cache has the tokens up to t and may have later ones.
        """
        c, B = self.config, len(q)
        row, inside = torch.arange(B, device=q.device)[:, None], torch.arange(c.block, device=q.device)
        own_B1 = t_B1 >> (c.block.bit_length() - 1)
        for name in ("k", "v"):  # right once the block is whole, and not read before
            block = self._at(tensors[name], own_B1 * c.block + inside)
            tensors[f"mean_{name}"][row, own_B1] = block.to(tensors[f"mean_{name}"].dtype).mean(1, keepdim=True)
        m = torch.arange(tensors["mean_k"].shape[1], device=q.device)
        weights = read_means(q, tensors["mean_k"], ((m + 1) * c.block <= t_B1 + 1)[:, None])
        compressed = self._mix(weights, tensors["mean_v"])
        best, exists = choose(weights.sum(3), own_B1, c.top)
        selected = self._select(q, tensors, (best[:, 0, ..., None] * c.block + inside).flatten(2), exists[:, 0], t_B1)
        last = t_B1 - torch.arange(c.window, device=q.device)
        windowed = attention_step(
            q, *(self._at(tensors[name], last).to(q.dtype) for name in ("k", "v")), visible_BS=last >= 0
        )
        return compressed, selected, windowed

    @staticmethod
    def _at(x_BSGK: Tensor, tokens_BN: Tensor) -> Tensor:
        """Return [B, N, G, K] at these tokens; others than there are give some token."""
        row = torch.arange(len(x_BSGK), device=x_BSGK.device)[:, None]
        return x_BSGK[row, tokens_BN.clamp(0, x_BSGK.shape[1] - 1)]

    def _select(self, q: Tensor, tensors: dict[str, Tensor], s_BGN: Tensor, exists: Tensor, t_B1: Tensor) -> Tensor:
        """Attend to the tokens s of the blocks that each group of heads has chosen; groups are rows here."""
        B, G, _ = s_BGN.shape
        row, group = (torch.arange(n, device=q.device) for n in (B, G))
        at = (row[:, None, None], s_BGN.clamp(max=tensors["k"].shape[1] - 1), group[:, None])
        k, v = (tensors[name][at].to(q.dtype).flatten(0, 1)[:, :, None] for name in ("k", "v"))
        seen = exists.repeat_interleave(self.config.block, dim=-1) & (s_BGN <= t_B1[..., None])
        o = attention_step(q.unflatten(2, (G, -1)).transpose(1, 2).flatten(0, 1), k, v, visible_BS=seen.flatten(0, 1))
        return o.unflatten(0, (B, G)).transpose(1, 2).flatten(2, 3)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Official: every matrix normal(0.02)."""
        branches = {f"branches.{name}": recipe for name, recipe in default_recipe(self.branches).items()}
        return self.recipe_by("plain") | branches

    def flops(self, length: int) -> float:
        """Projections, and scores and values of what is read: means of blocks, chosen blocks, the window."""
        c = self.config
        full, rest = divmod(length, c.block)
        queries = [c.block] * full + [rest]
        compressed = sum(count * m for m, count in enumerate(queries)) + full  # a block's last token reads its mean too
        earlier = sum(count * min(m, c.top - 1) for m, count in enumerate(queries)) * c.block
        selected = earlier + sum(count * (count + 1) / 2 for count in queries)
        W = min(c.window, length)
        windowed = W * (W + 1) / 2 + (length - W) * W
        gates = 2.0 * length * self.branches.weight.numel()
        return self.projection_flops(length) + gates + 4.0 * (compressed + selected + windowed) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Keys and values of every token, and their means, which are float32 or wider."""
        wide = torch.promote_types(self.out.weight.dtype, torch.float32).itemsize
        means_of = 2 * -(-length // self.config.block) * self.project.groups * self.project.dim
        return self.project.state_bytes(length) + means_of * wide

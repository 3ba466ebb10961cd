"""Influence: the factors times the values are the output of every op, block by block as at once, within 1 GB."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec
from basecap.ops import (
    Influence,
    attention,
    delta_rule,
    long_convolution,
    selective_scan,
    short_convolution,
    ssd,
    taylor_attention,
    top1_chunk,
    top1_element,
    wkv4,
    wkv6,
    wkv7,
)
from basecap.ops.top1_chunk import influence as chunk_influence
from basecap.ops.top1_element import influence as element_influence

B, T, H, G, K, V = 2, 45, 4, 2, 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 10 * len(shape)))


def heads(seed: int, width: int = K, count: int = H) -> Tensor:
    return draw(B, T, count, width, seed=seed)


def rates(*shape: int, seed: int = 0) -> Tensor:
    return 0.3 * draw(*shape, seed=seed).abs()


@dataclass(frozen=True)
class Case:
    """An op for some values [B, T, groups, width] and its influence, both with segments."""

    op: Callable[[Tensor, Tensor | None], Tensor]
    influence: Callable[[Tensor | None], Influence]
    groups: int = H
    width: int = V


q, k, k_groups = heads(1), heads(2), heads(3, count=G)
beta, decay = heads(4, 1)[..., 0].sigmoid(), -rates(B, T, H)
slopes, unit = torch.tensor([0.5, 0.25, 0.1, 0.02]), torch.nn.functional.normalize(k, dim=-1)
x_q, x_k = heads(5, 32), heads(6, 32, G)
scan = (rates(B, T, H), -rates(H, K), draw(B, T, K, seed=1), draw(B, T, K, seed=2))
wkv = (q, -rates(B, T, H, K), k, -unit, unit * beta[..., None])
bonus, keys, taps = draw(H, K), draw(B, T, H), draw(20, H)


def over_channels(function: Callable) -> Callable:
    """Run an op on [B, T, D] for values [B, T, D, 1]."""
    return lambda v, segments: function(v[..., 0], segments)[..., None]


CASES = {
    "attention": Case(
        lambda v, s: attention.attention(q, k_groups, v, segments=s),
        lambda s: attention.influence(q, k_groups, segments=s),
        groups=G,
        width=K,
    ),
    "attention, window and slopes": Case(
        lambda v, s: attention.attention(q, k, v, scale=0.7, window=7, slopes=slopes, segments=s),
        lambda s: attention.influence(q, k, scale=0.7, window=7, slopes=slopes, segments=s),
        width=K,
    ),
    "delta rule": Case(
        lambda v, s: delta_rule.delta_rule(q, unit, v, beta, segments=s)[0],
        lambda s: delta_rule.influence(q, unit, beta, segments=s),
    ),
    "gated delta rule": Case(
        lambda v, s: delta_rule.delta_rule(q, unit, v, beta, decay, segments=s)[0],
        lambda s: delta_rule.influence(q, unit, beta, decay, segments=s),
    ),
    "long convolution": Case(
        over_channels(lambda u, s: long_convolution.long_convolution(u, taps, segments=s)),
        lambda s: long_convolution.influence(taps, batch=B, length=T, segments=s),
        width=1,
    ),
    "selective scan": Case(
        over_channels(lambda x, s: selective_scan.selective_scan(x, *scan, segments=s)[0]),
        lambda s: selective_scan.influence(*scan, segments=s),
        width=1,
    ),
    "short convolution": Case(
        over_channels(lambda x, s: short_convolution.short_convolution(x, taps[:4].T, segments=s)),
        lambda s: short_convolution.influence(taps[:4].T, batch=B, length=T, segments=s),
        width=1,
    ),
    "ssd": Case(
        lambda v, s: ssd.ssd(heads(7, count=G), k_groups, v, decay, segments=s)[0],
        lambda s: ssd.influence(heads(7, count=G), k_groups, decay, segments=s),
    ),
    "taylor attention": Case(
        lambda v, s: taylor_attention.taylor_attention(q, k, v, segments=s, eps=0.1),
        lambda s: taylor_attention.influence(q, k, segments=s, eps=0.1),
    ),
    "top-1 chunk, exact": Case(
        lambda v, s: top1_chunk(x_q, x_k, v, chunk=16, remote=2, segments=s),
        lambda s: chunk_influence(x_q, x_k, chunk=16, remote=2, segments=s),
        groups=G,
        width=32,
    ),
    "top-1 chunk, approx": Case(
        lambda v, s: top1_chunk(x_q, x_k, v, chunk=16, mode="approx", scale=0.4, segments=s),
        lambda s: chunk_influence(x_q, x_k, chunk=16, mode="approx", scale=0.4, segments=s),
        groups=G,
        width=32,
    ),
    "top-1 element": Case(
        lambda v, s: top1_element(x_q, x_k, v, segments=s),
        lambda s: element_influence(x_q, x_k, segments=s),
        groups=G,
        width=32,
    ),
    "wkv4": Case(
        over_channels(lambda v, s: wkv4.wkv4(keys, v, bonus[:, 0].abs(), bonus[:, 1], segments=s)[0]),
        lambda s: wkv4.influence(keys, bonus[:, 0].abs(), bonus[:, 1], segments=s),
        width=1,
    ),
    "wkv6": Case(
        lambda v, s: wkv6.wkv6(q, k, v, wkv[1], bonus, segments=s)[0],
        lambda s: wkv6.influence(q, k, wkv[1], bonus, segments=s),
    ),
    "wkv7": Case(
        lambda v, s: wkv7.wkv7(*wkv[:3], v, *wkv[3:], segments=s)[0],
        lambda s: wkv7.influence(*wkv, segments=s),
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_influence_times_the_values_is_the_output(name: str, packed: bool):
    case, segments = CASES[name], torch.tensor([[0] * 1 + [3] * 20 + [4] * 24, [0] * 30 + [1] * 15]) if packed else None
    v = heads(9, case.width, case.groups)
    found = case.influence(segments)
    matrix = found.whole()
    assert matrix.dtype == torch.float64 and matrix.shape == (*found.shape, T)
    assert torch.equal(matrix, matrix.tril())
    product = torch.einsum("bhts,bshv->bthv", matrix, v.repeat_interleave(H // case.groups, dim=2))
    torch.testing.assert_close(product, case.op(v, segments))
    blocks = list(found.blocks(elements=3 * B * T * T))
    assert [block.shape[1] for block in blocks] == [3, 1]
    torch.testing.assert_close(torch.cat(blocks, dim=1), matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.mean_size(), matrix.abs().mean(1))


@pytest.mark.parametrize("name", CASES)
def test_segments_may_be_truth_values(name: str):
    segments = torch.tensor([[False] * 20 + [True] * 25, [False] * 1 + [True] * 44])
    matrix = CASES[name].influence(segments).whole()
    assert torch.equal(matrix, CASES[name].influence(segments.long()).whole())


def test_influence_of_outputs_and_values_with_factors_of_their_own():
    found, reads, writes = Influence.of(draw(B, H, T, T)), draw(B, T, H, seed=1), draw(B, T, H, seed=2)
    expected = torch.einsum("bth,bhts,bsh->bhts", reads, found.whole(), writes)
    torch.testing.assert_close(found.scaled(reads, writes).whole(), expected)
    torch.testing.assert_close(torch.cat(list(found.scaled(reads, writes).blocks(1)), dim=1), expected)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: attention.influence(q, k[:, 1:]),
        lambda: delta_rule.influence(q, unit, beta[1:]),
        lambda: long_convolution.influence(taps[0], batch=B, length=T),
        lambda: selective_scan.influence(scan[0], scan[1].T, *scan[2:]),
        lambda: ssd.influence(q, k, decay, segments=torch.zeros(1, T, dtype=torch.int64)),
        lambda: taylor_attention.influence(q, k, eps=-1),
        lambda: chunk_influence(x_q, x_k, chunk=15),
        lambda: chunk_influence(None, x_k),
        lambda: element_influence(x_q, x_k[:1]),
        lambda: element_influence(None, x_k),
        lambda: short_convolution.influence(taps[0], batch=B, length=T),
        lambda: wkv4.influence(keys, bonus[:, 0], bonus[0]),
        lambda: wkv6.influence(q, k, wkv[1], bonus[1:]),
        lambda: wkv7.influence(*wkv[:4], heads(0, K + 1)),
    ],
)
def test_what_does_not_fit_is_refused(broken):
    with pytest.raises(ConfigError):
        broken()


OTHERS = ["rwkv-4", "rwkv-6", "rwkv-7", "top1-chunk-exact", "top1-element", "transformer++ alibi"]


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive at once."""

    def __init__(self):
        super().__init__()
        self.most, self._alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return made


@pytest.mark.parametrize("name", ["based", "deltanet", "hyena", "mamba-1", "mamba-1 decay one", "mamba-2", *OTHERS])
def test_memory_of_1024_tokens_at_full_size(name: str):
    """Of tensors that have shapes and no numbers."""
    for choice in ARCHITECTURES.get(name).layers:
        with FakeTensorMode(), torch.no_grad():
            mixer = choice.mixer(choice.configure(768, {}), LayerSpec(hidden=768, index=0, depth=12, max_length=1024))
            x = torch.empty(1, 1024, 768)
            with Live() as live:
                total = torch.zeros(1, 1024, 1024)
                for block in islice(mixer.influence(x).blocks(), 3):  # the others are like these
                    total += block.abs().sum(1)
        assert 2**22 < live.most < 2**30

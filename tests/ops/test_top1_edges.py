"""Top-1 selection at the edges: autocast, numbers that are none, more chunks asked for than there are."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from basecap.errors import ConfigError
from basecap.ops import (
    _kept,
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_choice,
    top1_chunk_step,
    top1_chunk_weights,
    top1_element,
)
from basecap.ops.top1_chunk import grid as grids
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.ops.top1_element import top1_element_choice, top1_element_step, top1_element_weights
from basecap.testing.tolerance import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

B, T, H, K = 2, 200, 2, 32


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k and v [B, T, H, K]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, H, K, generator=generator).to(dtype) for _ in range(3)]


def chunk_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = top1_chunk_cache(B, T, H, K, chunk=16, dtype=q.dtype)
    return torch.cat([top1_chunk_step(*(x[:, t : t + 1] for x in (q, k, v)), cache, t, chunk=16) for t in range(40)])


def element_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = {"k": torch.zeros_like(k), "v": torch.zeros_like(v)}
    return torch.cat([top1_element_step(*(x[:, t : t + 1] for x in (q, k, v)), cache, t) for t in range(40)])


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "exact": lambda q, k, v: top1_chunk(q, k, v, chunk=16),
    "approx": lambda q, k, v: top1_chunk(q, k, v, chunk=16, mode="approx"),
    "weights": lambda q, k, v: top1_chunk_weights(q, k, chunk=16),
    "step": chunk_step,
    "element": lambda q, k, v: top1_element(q, k, v),
    "element choice": lambda q, k, v: top1_element_choice(q, k),
    "element weights": lambda q, k, v: top1_element_weights(q, k),
    "element step": element_step,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_changes_nothing(name: str, dtype: torch.dtype):
    inputs = drawn(dtype)
    want = FUNCTIONS[name](*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(FUNCTIONS[name](*inputs), want)


def test_autocast_changes_no_gradient():
    inputs = [x.requires_grad_() for x in drawn()]
    want = torch.autograd.grad(top1_chunk(*inputs, chunk=16).sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(top1_chunk(*inputs, chunk=16).sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("place", ["query", "key"])
def test_an_element_that_is_no_number_is_not_chosen(place: str, backend: str):
    q, k, v = drawn()
    segments = torch.arange(T).expand(B, T) // 50
    clean = top1_element_choice(q, k, segments=segments, backend=backend)
    (q if place == "query" else k)[:, 60] = float("nan")
    found = top1_element_choice(q, k, segments=segments, backend=backend)
    weights = top1_element_weights(q, k, segments=segments)
    assert torch.equal(weights.argmax(-1), found.mT) and (weights.sum(-1) == 1).all()
    position = torch.arange(T)[:, None]
    assert (found <= position).all() and (found >= position // 50 * 50).all()
    same = torch.arange(T) != 60 if place == "query" else torch.arange(T) < 60
    assert torch.equal(found[:, same], clean[:, same])
    if place == "key":
        assert (found[:, 61:] != 60).all()
        o, trained = (
            top1_element(q, k.requires_grad_(wanted), v, segments=segments, backend=backend) for wanted in (False, True)
        )
        assert torch.equal(trained, o) and o.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_more_chunks_than_there_are(backend: str):
    q, k, v = (x[:1, :60, :1] for x in drawn())
    some, many = (top1_chunk(q, k, v, chunk=16, remote=remote, backend=backend) for remote in (3, 10**9))
    assert torch.equal(some, many)
    choice = top1_chunk_choice(q, k, chunk=16, remote=20, backend=backend)
    assert choice.shape == (1, 60, 1, 20)
    assert torch.equal((choice >= 0).sum(-1), (torch.arange(60) // 16)[None, :, None])
    cache = top1_chunk_cache(1, 3, 1, K, chunk=16)
    assert top1_chunk_step(q[:, :1], k[:, :1], v[:, :1], cache, 0, chunk=16, remote=10**9).shape == (1, 1, 1, K)


def test_bounds_and_segments_say_the_same_to_top1_element():
    q, k, v = (x[:1].requires_grad_() for x in drawn())
    bounds = torch.tensor([0, 1, 70, 71, T], dtype=torch.int32)
    segments = torch.repeat_interleave(torch.arange(4), bounds.diff())[None]
    outputs = [top1_element(q, k, v, cu_seqlens=bounds), top1_element(q, k, v, segments=segments)]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in outputs]
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))
    with pytest.raises(ConfigError, match="cu_seqlens must increase"):
        top1_element(q, k, v, cu_seqlens=torch.tensor([0, 70, 60, T]))


@pytest.mark.parametrize("bounds", [[0, 20, 60], [0, 30, 20, 50], [5, 20, 50], [0, 20, 40]])
def test_a_compiled_graph_checks_its_bounds(bounds: list[int]):
    def packed(q: Tensor, bounds: Tensor) -> Tensor:
        return top1_chunk(q, q, q, chunk=16, cu_seqlens=bounds)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 50, 2, 32)
    right = torch.tensor([0, 20, 50])
    assert torch.equal(compiled(q, right), top1_chunk(q, q, q, chunk=16, cu_seqlens=right))
    with pytest.raises(RuntimeError, match="cu_seqlens must increase strictly"):
        compiled(q, torch.tensor(bounds))


def test_a_grid_takes_no_division():
    """Of ranges, compiled for a CPU, PyTorch 2.13 gets the last quotients wrong; to compile this takes 20 seconds."""
    uniform = make_fx(lambda: grids._uniform_grid(2, 299, 32, torch.device("cpu")))()
    packed = make_fx(lambda bounds: grids._packed_grid(bounds, 299, 32))(torch.tensor([0, 70, 299]))
    for graph in (uniform, packed):
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert any("shift" in name for name in called)
        assert not [name for name in called if re.search("div|remainder|fmod", name)]


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"segments": torch.zeros(B, T)}, "segments must be integers"),
        (
            {"segments": torch.arange(T, 0, -1).expand(B, T).to(torch.uint64)},
            "segments must be integers, .*not torch.uint64",
        ),
        ({"cu_seqlens": torch.tensor([0, T], dtype=torch.complex64)}, "cu_seqlens must be integers"),
        ({"segments": [[0] * T] * B}, r"segments must be a torch\.Tensor, not list"),
        ({"segments": -torch.arange(T).expand(B, T)}, "segments must not decrease"),
        ({"cu_seqlens": [0, T]}, r"cu_seqlens must be a torch\.Tensor, not list"),
    ],
    ids=str,
)
def test_packing_is_checked(packing, message):
    q, k, v = drawn()
    for op in (top1_chunk, top1_element):
        with pytest.raises(ConfigError, match=message):
            op(q, k, v, **packing)


@pytest.mark.parametrize("wrong", [None, [1.0], torch.ones(B, T, H, K).numpy(), torch.ones(B, T, H, K, dtype=int)])
@pytest.mark.parametrize("op", [top1_chunk_choice, top1_chunk_weights, top1_element_choice, top1_element_weights])
def test_keys_that_are_no_floating_tensors_are_named(op, wrong):
    with pytest.raises(ConfigError, match=r"^k must be (a torch\.Tensor|floating point), not"):
        op(drawn()[0], wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("op", [top1_chunk_choice, top1_element_choice])
def test_tensors_without_a_dense_layout_are_refused(op):
    q, k, _ = drawn()
    with pytest.raises(ConfigError, match=r"^k must be a dense tensor, not sparse; convert it\."):
        op(q, k.to_sparse())
    with pytest.raises(ConfigError, match=r"^q must be a dense tensor, not nested; convert it\."):
        op(torch.nested.nested_tensor(list(q)), k)


def test_a_look_without_gradients_leaves_nothing_that_training_cannot_use():
    q, k, v = (x[:, :77].requires_grad_() for x in drawn())
    with torch.inference_mode():
        top1_chunk(q, k, v, chunk=16)
    top1_chunk(q, k, v, chunk=16).sum().backward()
    assert q.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("name", ["exact", "element"])
def test_forward_mode_is_refused_and_not_zero(name: str):
    q, k, v = drawn()
    with forward_ad.dual_level(), pytest.raises(ConfigError, match="forward-mode"):
        FUNCTIONS[name](q, k, forward_ad.make_dual(v, v))


def test_tracing_leaves_nothing_for_others():
    inputs = [x[:, :53] for x in drawn()]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        top1_chunk(*fake, chunk=16)
        bounds = mode.from_tensor(torch.tensor([0, 20, 53]))
        for op in (top1_chunk, top1_element):
            assert op(*(x[:1] for x in fake), cu_seqlens=bounds).shape == (1, 53, H, K)
    assert top1_chunk(*inputs, chunk=16).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3.0, 300.0])
def test_large_scores_in_half_precision(dtype: torch.dtype, size: float):
    """One chunk is plain causal attention; scores of this size, rounded to half precision, are wrong or infinite."""
    q, k, v = (x[:, :40].to(dtype) for x in drawn())
    q, k = size * q, size * k
    found = top1_chunk(q, k, v, chunk=64, backend="eager")
    heads = [x.transpose(1, 2).double() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    assert relative_error(found, exact) < 2 * torch.finfo(dtype).eps


def test_a_grid_in_a_cuda_graph_outlives_those_of_other_lengths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grids, "_GRIDS", _kept.Kept(grids._uniform_grid, lambda grid: grid))
    capturing = False
    monkeypatch.setattr(_kept, "_captures", lambda device: capturing)
    x, other = torch.empty(2, 40, 1, 8), torch.empty(2, 41, 1, 8)
    before = chunk_grid(x, 16, None, None)
    capturing = True
    assert chunk_grid(x, 16, None, None) is before
    # What a graph would compute exists only when that is replayed.
    assert chunk_grid(other, 16, None, None) is not chunk_grid(other, 16, None, None)
    capturing = False
    for length in range(1, 40):
        chunk_grid(torch.empty(1, length, 1, 8), 16, None, None)
    assert len(grids._GRIDS.kept) <= _kept.MOST_KEPT
    assert chunk_grid(x, 16, None, None) is before


@pytest.mark.parametrize("transform", ["fake tensors", "functionalize"])
def test_a_grid_of_traced_tensors_is_not_used_again(transform: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grids, "_GRIDS", _kept.Kept(grids._uniform_grid, lambda grid: grid))
    x = torch.ones(1, 64, 2, 32)
    if transform == "fake tensors":
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            top1_chunk(x, x, x, chunk=16)
    else:
        torch.func.functionalize(lambda x: top1_chunk(x, x, x, chunk=16))(x)
    assert not grids._GRIDS.kept
    torch.testing.assert_close(top1_chunk(x, x, x, chunk=16), x)


def test_another_stream_waits_for_no_grid_of_the_first(monkeypatch: pytest.MonkeyPatch):
    """It may run before the first stream has computed it, and after the first used its memory for something else."""
    monkeypatch.setattr(grids, "_GRIDS", _kept.Kept(grids._uniform_grid, lambda grid: grid))
    stream, capturing = 0, False
    monkeypatch.setattr(_kept, "_stream", lambda device: stream)
    monkeypatch.setattr(_kept, "_captures", lambda device: capturing)
    x = torch.empty(2, 40, 1, 8)
    first = chunk_grid(x, 16, None, None)
    stream = 1
    second = chunk_grid(x, 16, None, None)
    assert second is not first and chunk_grid(x, 16, None, None) is second
    capturing, stream = True, 2  # a capture has a stream of its own, and all others were waited for
    assert chunk_grid(x, 16, None, None) is first

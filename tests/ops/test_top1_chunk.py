"""Top-1 chunk selection against its definition in float64: plain PyTorch anywhere, kernels by interpreter or GPU."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import (
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_choice,
    top1_chunk_fill,
    top1_chunk_step,
    top1_chunk_weights,
)
from basecap.ops._dispatch import interpreted
from basecap.ops.top1_chunk import operators, reference
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._choices import Rules, assert_choice, assert_earlier_among_equals

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
KERNELS = [
    pytest.param("cpu", torch.float32, marks=in_interpreter, id="interpreter"),
    *(pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]
# Lanes that a mask switches off may hold anything; the interpreter warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: B, T, H, G, K, chunk, mode, remote, segments
CASES = [
    (2, 100, 4, 2, 32, 16, "exact", 1, False),
    (1, 130, 2, 2, 40, 32, "approx", 1, True),
    (1, 90, 4, 1, 32, 16, "exact", 2, True),
    (1, 100, 2, 1, 32, 16, "approx", 3, False),
    (1, 200, 1, 1, 32, 64, "exact", 1, True),
    (1, 300, 1, 1, 32, 128, "exact", 1, False),
    (1, 520, 1, 1, 32, 256, "approx", 1, False),
    # Many rows: the exact dq is 0 where there is one key, and the worst of few roundings is luck.
    (64, 1, 2, 2, 32, 16, "exact", 1, False),
    (3, 15, 1, 1, 256, 16, "approx", 1, False),
    (1, 70, 2, 2, 64, 16, "approx", 1, True),
    (1, 100, 2, 1, 100, 16, "exact", 2, True),
    (1, 150, 2, 1, 128, 32, "exact", 1, False),
    (1, 300, 1, 1, 128, 128, "exact", 1, False),
    (1, 90, 2, 1, 128, 16, "approx", 2, True),
    (1, 140, 1, 1, 256, 64, "exact", 1, False),
    (1, 90, 1, 1, 256, 16, "approx", 1, False),
]


def draw(B: int, T: int, H: int, G: int, K: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v, do, q and k normalised."""
    generator = torch.Generator().manual_seed(T + K)
    q, k, v, do = (torch.randn(B, T, n, K, generator=generator) for n in (H, G, G, H))
    return [x.to(dtype) for x in (F.rms_norm(q, (K,)), F.rms_norm(k, (K,)), v, do)]


def cut(B: int, T: int) -> Tensor:
    """Return segments, about one in thirty positions starts one."""
    return (torch.rand(B, T, generator=torch.Generator().manual_seed(T)) < 0.03).long().cumsum(1)


def along_row(choice: Tensor, chunk: int, segments: Tensor | None) -> Tensor:
    """Turn `top1_chunk_choice` into the mask of chunks along the row that the reference takes."""
    B, T, H, _ = choice.shape
    ids = torch.zeros(B, T, dtype=torch.int64) if segments is None else segments
    numbers = reference._chunks(T, chunk, ids)
    first = torch.stack([numbers[b][ids[b] == i].min() for b in range(B) for i in ids[b]]).view(B, T)
    M = int(numbers.max()) + 1
    target = torch.where(choice >= 0, choice + first[:, :, None, None], M)
    return torch.zeros(B, T, H, M + 1, dtype=torch.bool).scatter(-1, target, True)[..., :M]


def exact(inputs: list[Tensor], case: tuple, choice: Tensor, segments: Tensor | None) -> list[Tensor]:
    """Return o, dq, dk, dv of the definition in float64 under a given choice."""
    chunk, mode, remote = case[5:8]
    q, k, v, do = (x.double().cpu().requires_grad_() for x in inputs)
    mask = along_row(choice.long().cpu(), chunk, segments)
    weights = reference.weights(q, k, chunk, mode, q.shape[3] ** -0.5, remote, segments, mask)
    o = reference.top1_chunk(q, k, v, weights)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def run(inputs: list[Tensor], case: tuple, segments: Tensor | None, backend: str) -> tuple[Tensor, list[Tensor]]:
    """Return the choice and o, dq, dk, dv."""
    chunk, mode, remote = case[5:8]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    options = {"chunk": chunk, "mode": mode, "remote": remote, "segments": segments, "backend": backend}
    o = top1_chunk(q, k, v, **options)
    return top1_chunk_choice(q, k, **options), [o, *torch.autograd.grad(o, (q, k, v), inputs[3])]


def plain(inputs: list[Tensor], case: tuple, segments: Tensor | None) -> list[Tensor]:
    """Return o, dq, dk, dv of plain PyTorch under the choice of the kernels."""
    chunk, mode, remote = case[5:8]
    grid, own = chunk_grid(inputs[0], chunk, segments, None)
    scale = case[4] ** -0.5
    q, k, v = (x.flatten(0, 1).clone().requires_grad_() for x in inputs[:3])
    choice = operators.choose(
        q.detach(), k.detach(), [grid, own], chunk, mode == "exact", scale, remote, "triton_kernels"
    )
    o, *_ = operators.attend(q, k, v, choice, [grid, own], chunk, scale, "eager")
    found = [o, *torch.autograd.grad(o, (q, k, v), inputs[3].flatten(0, 1))]
    return [x.unflatten(0, inputs[0].shape[:2]) for x in found]


def assert_kernels(inputs: list[Tensor], case: tuple, segments: Tensor | None) -> Tensor:
    """Compare the kernels with plain PyTorch and the definition, both choices with scores in float64; return theirs."""
    there = None if segments is None else segments.to(inputs[0].device)
    choice, found = run(inputs, case, there, "triton")
    rules = Rules(*case[5:8], segments=there)
    assert_choice(choice, *inputs[:2], rules, "the kernels' choice")
    assert_choice(top1_chunk_choice(*inputs[:2], **vars(rules), backend="eager"), *inputs[:2], rules, "plain PyTorch's")
    truth = exact(inputs, case, choice, segments)
    for name, x, y, z in zip(("o", "dq", "dk", "dv"), found, plain(inputs, case, there), truth, strict=True):
        assert_as_accurate(name, x, y, z)
    return choice


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_pytorch_is_the_definition(case):
    inputs = draw(*case[:5])
    segments = cut(*case[:2]) if case[8] else None
    choice, found = run(inputs, case, segments, "eager")
    assert_choice(choice, *inputs[:2], Rules(*case[5:8], segments=segments))
    _, score = reference.visible(*inputs[:2], *case[5:7], case[4] ** -0.5, case[7], segments)
    assert torch.equal(along_row(choice.long(), case[5], segments), _best(score, case[7]))
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, exact(inputs, case, choice, segments), strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def _best(score_BHTM: Tensor, remote: int) -> Tensor:
    """Choose by sorting pairs in Python: highest score, then lowest index."""
    chosen = torch.zeros_like(score_BHTM, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in score_BHTM.shape[:3])).tolist():
        row = score_BHTM[tuple(at)].tolist()
        for m in sorted((m for m in range(len(row)) if row[m] > -float("inf")), key=lambda m: (-row[m], m))[:remote]:
            chosen[(*at, m)] = True
    return chosen.transpose(1, 2)


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_as_accurate_as_plain_pytorch(case, device, dtype, poisoned):
    inputs = [x.to(device, dtype) for x in draw(*case[:5])]
    segments = cut(*case[:2]) if case[8] else None
    assert_kernels(inputs, case, segments)


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.parametrize("gain", [1.0, 40.0], ids=["bounded", "unbounded"])
def test_large_scores_take_the_safe_path(gain, device, dtype, poisoned):
    case = (4, 80, 2, 2, 32, 16, "exact", 1, False)
    inputs = [x.to(device, dtype) for x in draw(*case[:5])]
    # Products are exact in float32, so that they do not depend on the order of summation.
    inputs[:2] = (inputs[0] * 8).round() / 8 * gain, (inputs[1] * 8).round() / 8
    assert_kernels(inputs, case, None)


def structured(kind: str, T: int, K: int) -> list[Tensor]:
    """Return q, k, v, do with one head in which all queries choose alike, or no chunk stands out."""
    q, k, v, do = draw(1, T, 1, 1, K, torch.float32)
    if kind == "one chunk":
        k = k * 0.1
        k[:, :16] = q[:, :1]
        q = q[:, :1].expand_as(q) + 0.01 * q
    elif kind == "equal keys":
        # Whole numbers, so that equal scores are equal in any order of summation.
        q, k = q.round(), k[:, :1].round().expand_as(k)
    elif kind == "equal chunks":
        # Eighths, for the same reason.
        q, k = ((8 * x).round() / 8 for x in (q, torch.cat([k[:, 16:32], k[:, 16:]], dim=1)))
    return [x.contiguous() for x in (q, k, v, do)]


@pytest.mark.parametrize(("device", "dtype"), KERNELS[:2])
@pytest.mark.parametrize("kind", ["one chunk", "equal keys", "equal chunks"])
@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_structured_inputs(kind, mode, device, dtype, poisoned):
    case = (1, 620 if kind == "one chunk" else 150, 1, 1, 32, 16, mode, 1, False)
    inputs = [x.to(device) for x in structured(kind, case[1], case[4])]
    choice = assert_kernels(inputs, case, None)
    if kind == "one chunk":
        # Longer than a share: the list of chunk 0 is cut.
        assert (choice[:, 16:] == 0).sum() > 512
    else:
        assert_earlier_among_equals(choice, *inputs[:2], Rules(16, mode))


@pytest.mark.parametrize(("device", "dtype"), KERNELS[1:])  # the interpreter does one thing after the other
def test_runs_repeat_bit_for_bit(device, dtype):
    case = CASES[0]
    inputs = [x.to(device, dtype) for x in draw(*case[:5])]
    first, again = (run(inputs, case, None, "triton") for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(x, y) for x, y in zip(first[1], again[1], strict=True))


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
@pytest.mark.parametrize("mode", ["exact", "approx"])
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's maximum, which skips NaN
def test_queries_that_are_no_numbers_choose_nothing_and_such_chunks_are_not_chosen(mode: str, backend: str):
    generator = torch.Generator().manual_seed(0)
    q, k = (F.rms_norm(torch.randn(1, 128, 1, 16, generator=generator), (16,)) for _ in range(2))
    lost = torch.zeros(128, dtype=torch.bool)
    lost[32:64], lost[90:93] = True, True
    choice = top1_chunk_choice(
        q.masked_fill(lost[:, None, None], float("nan")), k, chunk=16, mode=mode, backend=backend
    )
    whole = top1_chunk_choice(q, k, chunk=16, mode=mode, backend=backend)
    assert (choice[0, lost] == -1).all()
    assert torch.equal(choice[0, ~lost], whole[0, ~lost])
    k[:, 20] = float("nan")
    choice = top1_chunk_choice(q, k, chunk=16, mode=mode, backend=backend)
    assert (choice != 1).all() and (choice[0, 16:] >= 0).all()
    v = q.masked_fill(k.isnan(), float("nan"))
    cache = top1_chunk_cache(1, 128, 1, 16, chunk=16)
    top1_chunk_fill(k[:, :-1], v[:, :-1], cache, chunk=16)
    for remote in (1, 7):
        options = {"chunk": 16, "mode": mode, "remote": remote, "backend": backend}
        o = top1_chunk_step(q[:, -1:], k[:, -1:], v[:, -1:], cache, 127, **options)
        torch.testing.assert_close(o, top1_chunk(q, k, v, **options)[:, -1:])
        assert o.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_the_future_and_other_sequences_leave_no_trace(backend):
    case = (1, 90, 2, 1, 32, 16, "exact", 1, True)
    inputs = draw(*case[:5], torch.float32)
    segments = torch.tensor([[0] * 25 + [3] * 50 + [4] * 15])
    _, before = run(inputs, case, segments, backend)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :25] = 7.0
        x[:, 60:] = -3.0
    _, after = run(changed, case, segments, backend)
    assert torch.equal(before[0][:, 25:60], after[0][:, 25:60])
    q = inputs[0].clone().requires_grad_()
    k, v = (x.clone().requires_grad_() for x in inputs[1:3])
    top1_chunk(q, k, v, chunk=16, segments=segments, backend=backend)[:, 40].sum().backward()
    for grad in (q.grad, k.grad, v.grad):
        assert not grad[:, :25].any()
        assert not grad[:, 41:].any()


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_packed_lengths_are_segments(backend):
    q, k, v, _ = draw(1, 90, 2, 1, 32, torch.float32)
    lengths = torch.tensor([0, 25, 26, 75, 90], dtype=torch.int32)
    segments = torch.repeat_interleave(torch.arange(4), lengths.diff()[:4])[None]
    a = top1_chunk(q, k, v, chunk=16, cu_seqlens=lengths, backend=backend)
    b = top1_chunk(q, k, v, chunk=16, segments=segments, backend=backend)
    alone = top1_chunk(*(x[:, 26:75] for x in (q, k, v)), chunk=16, backend=backend)
    choice = top1_chunk_choice(q, k, chunk=16, segments=segments, backend=backend)
    assert_choice(choice, q, k, Rules(16, segments=segments))
    truth, *_ = exact([q, k, v, v.expand_as(q)], (*q.shape, None, 16, "exact", 1), choice, segments)
    torch.testing.assert_close(a, truth.float())
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a[:, 26:75], alone)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_inputs_need_not_be_contiguous(backend):
    q, k, v, _ = draw(2, 40, 2, 2, 32, torch.float32)
    joined = torch.stack([q, k, v], dim=2)
    views = joined.unbind(2)
    turned = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (q, k, v)]
    o = top1_chunk(q, k, v, chunk=16, backend=backend)
    choice = top1_chunk_choice(q, k, chunk=16, backend=backend)
    assert_choice(choice, q, k, Rules(16))
    truth, *_ = exact([q, k, v, v], (*q.shape, None, 16, "exact", 1), choice, None)
    torch.testing.assert_close(o, truth.float())
    assert torch.equal(o, top1_chunk(*views, chunk=16, backend=backend))
    assert torch.equal(o, top1_chunk(*turned, chunk=16, backend=backend))


def test_several_remote_chunks_are_mixture_of_block_attention():
    """MoBA (arXiv 2502.13189, eq. 5-6): top-k blocks by mean key, the own block always among them."""
    topk, chunk = 3, 16
    q, k, v, _ = draw(1, 96, 2, 2, 32)
    T = q.shape[1]
    means = k.unflatten(1, (T // chunk, chunk)).mean(2)
    gate = torch.einsum("bthk,bmhk->bhtm", q, means)
    own, block = torch.arange(T) // chunk, torch.arange(T // chunk)
    gate = gate.masked_fill(block > own[:, None], -float("inf")).masked_fill(block == own[:, None], float("inf"))
    picked = torch.zeros_like(gate).scatter(-1, gate.topk(topk).indices, 1.0) > 0
    picked &= gate > -float("inf")
    mask = picked.repeat_interleave(chunk, dim=-1) & torch.ones(T, T, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)
    torch.testing.assert_close(top1_chunk(q, k, v, chunk=chunk, mode="approx", remote=topk - 1), expected)


def test_dense_weights_reproduce_the_output_and_are_differentiable():
    q, k, v, _ = draw(1, 60, 2, 1, 32)
    weights = top1_chunk_weights(q.requires_grad_(), k, chunk=16)
    torch.testing.assert_close(reference.top1_chunk(q, k, v, weights), top1_chunk(q, k, v, chunk=16))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert torch.autograd.grad(weights[..., 0].sum(), q)[0].abs().sum() > 0


@pytest.mark.parametrize("mode", ["exact", "approx"])
@pytest.mark.parametrize(("K", "chunk"), [(32, 16), (64, 16), (128, 16), (256, 64)])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), *KERNELS])
def test_decoding_equals_the_whole_sequence(mode, K, chunk, device, dtype, monkeypatch):
    if dtype != torch.float64:
        from basecap.ops.top1_chunk.triton_step import launch

        # Programs read one chunk each with one of the sizes, and as many as in large caches with the others.
        monkeypatch.setattr(launch, "FEWEST", launch.FEWEST if K == 32 else 1)
    options = {"chunk": chunk, "mode": mode, "remote": 2, "backend": "eager" if dtype == torch.float64 else "triton"}
    T, first = 4 * chunk + 6, 3 * chunk - 8
    q, k, v, _ = (x.to(device, dtype) for x in draw(1, T, 2, 1, K))
    whole = top1_chunk(q, k, v, **options)
    cache = top1_chunk_cache(1, T, 1, K, chunk=chunk, dtype=dtype, device=device)
    top1_chunk_fill(k[:, :first], v[:, :first], cache, chunk=chunk)
    steps = [
        top1_chunk_step(*(x[:, t : t + 1] for x in (q, k, v)), cache, t, **options) for t in range(first, first + 16)
    ]
    o, whole = torch.cat(steps, 1), whole[:, first : first + 16]
    if dtype == torch.float64:
        torch.testing.assert_close(o, whole, atol=1e-15, rtol=1e-15)
    else:
        options["backend"] = "eager"
        inputs = (q, k, v), (x.double() for x in (q, k, v))
        beside, truth = (top1_chunk(*x, **options)[:, first : first + 16] for x in inputs)
        assert_as_accurate("the whole sequence", whole, beside, truth)
        assert_as_accurate("a step", o, beside, truth)
    with pytest.raises(ConfigError, match="full"):
        top1_chunk_step(*(x[:, :1] for x in (q, k, v)), cache, T, chunk=chunk)


@pytest.mark.parametrize("family", ["eager", pytest.param("triton_kernels", marks=in_interpreter)])
def test_operators_keep_their_contracts(family):
    q, k, v, _ = draw(1, 50, 2, 1, 32, torch.float32)
    layout = list(chunk_grid(q, 16, None, None))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    choice = operators.choose(q.detach(), k.detach(), layout, 16, True, 0.2, 1, family)
    torch.library.opcheck(operators.choose.overload, (q.detach(), k.detach(), layout, 16, True, 0.2, 1, family))
    torch.library.opcheck(operators.attend.overload, (q, k, v, choice, layout, 16, 0.2, family))


@pytest.mark.parametrize("packed", [False, True])
def test_one_compiled_graph(packed):
    q, k, v, do = draw(1, 50, 2, 1, 32, torch.float32)
    lengths = torch.tensor([0, 20, 50], dtype=torch.int32) if packed else None

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (top1_chunk(q, k, v, chunk=16, cu_seqlens=lengths) * do).sum()

    leaves = [x.requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*leaves), leaves)
    for x, y in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 48}, "chunk must be a power of two"),
        ({"chunk": 512}, "chunk must be a power of two"),
        ({"mode": "exakt"}, "did you mean 'exact'"),
        ({"remote": 0}, "remote must be an integer of at least 1"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"cu_seqlens": torch.tensor([0, 9, 4, 20])}, "cu_seqlens must increase"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "from 0 to T = 20"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "cu_seqlens must be integers"),
        ({"segments": torch.zeros(1, 7, dtype=torch.int64)}, r"segments \(1, 7\)"),
        ({"segments": torch.zeros(1, 20).long(), "cu_seqlens": torch.tensor([0, 20])}, "give one of them"),
        ({"v": torch.zeros(1, 20, 1, 8)}, r"v \(1, 20, 1, 8\)"),
        ({"k": torch.zeros(1, 20, 3, 32), "v": torch.zeros(1, 20, 3, 32)}, "not a multiple of the 3 heads"),
        ({"k": torch.zeros(1, 20, 1, 32).half()}, "k is torch.float16"),
        ({"q": torch.zeros(20, 2, 32)}, r"q \(20, 2, 32\) must be"),
        ({"backend": "cuda"}, "unknown backend"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "q": torch.zeros(1, 20, 2, 32),
        "k": torch.zeros(1, 20, 1, 32),
        "v": torch.zeros(1, 20, 1, 32),
        **change,
    }
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ConfigError, match=message):
        top1_chunk(q, k, v, **arguments)

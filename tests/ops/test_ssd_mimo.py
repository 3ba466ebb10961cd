"""The state space of several writes and reads: plain PyTorch and the kernels against the definition in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted, recorded
from basecap.ops.ssd_mimo import Heads, Strengths, reference, ssd_mimo, triton_chunks
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import draw, packed

NAMES = ("q", "k", "v", "log_decay", "now", "kept", "q_bias", "k_bias", "angles", "state")
#: B, T, R, G, H, K, V and A: one token; a chunk's last rows alone; ranks that fill no power of two; groups; whole and
#: partial rotations; blocks of channels that are not full.
SIZES = [
    (2, 1, 4, 1, 2, 6, 5, 2), (1, 37, 3, 1, 2, 16, 20, 8), (2, 70, 1, 2, 4, 20, 18, 3), (1, 17, 8, 1, 1, 8, 4, 4),
    (1, 16, 5, 3, 3, 7, 3, 3), (1, 33, 2, 1, 2, 72, 8, 33), (1, 24, 4, 1, 2, 16, 16, 4),
]  # fmt: skip

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def inputs(
    sizes: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float64, strength: float = 0.1
) -> list[Tensor]:
    """The tensors of `NAMES`; v in `dtype`, the others in float32 or wider."""
    B, T, R, G, H, K, V, A = sizes
    shapes = [(B, T, R, G, K), (B, T, R, G, K), (B, T, R, H, V), *[(B, T, H)] * 3, *[(H, R, K)] * 2, (B, T, H, A)]
    drawn = [draw(seed, *shape) for seed, shape in enumerate([*shapes, (B, H, K, V)])]
    drawn[3] = -strength * drawn[3].abs()
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(device, dtype if name == "v" else wide) for name, x in zip(NAMES, drawn, strict=True)]


def run(backend: str | None, tensors: list[Tensor], segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and the final state of the op with this backend, or of the definition."""
    q, k, v, *rest, state = tensors
    strengths, heads = Strengths(*rest[:3]), Heads(*rest[3:])
    if backend is None:
        return reference.ssd_mimo(q, k, v, strengths, heads, state, segments)
    return ssd_mimo(q, k, v, strengths, heads=heads, state_BHKV=state, segments=segments, backend=backend)


def results(backend: str | None, tensors: list[Tensor], segments: Tensor | None = None) -> list[Tensor]:
    """Outputs, final state and all gradients: of the op with this backend, or of the definition."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = run(backend, leaves, segments)
    weights = [draw(90 + i, *x.shape).to(x) for i, x in enumerate(outputs)]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]


def assert_kernels(tensors: list[Tensor], segments: Tensor | None = None) -> None:
    """Compare the kernels with the definition in float64, their errors with those of plain PyTorch."""
    truth = results(None, [x.double() for x in tensors], segments)
    plain, found = results("eager", tensors, segments), results("triton", tensors, segments)
    for name, a, b, exact in zip(("o", "final", *NAMES), found, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_definition(sizes: tuple[int, ...], segmented: bool):
    tensors = inputs(sizes, strength=1.0)
    segments = packed(sizes[0], range(3, sizes[1], 11), sizes[1]) if segmented else None
    for ours, theirs in zip(results("eager", tensors, segments), results(None, tensors, segments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_without_biases_angles_and_a_state(backend: str):
    q, k, v, log_decay, now, kept, *_ = inputs((2, 40, 3, 1, 2, 8, 4, 0), dtype=torch.float32)
    o, state = ssd_mimo(q, k, v, Strengths(log_decay, now, kept), backend=backend)
    exact = reference.ssd_mimo(
        q.double(), k.double(), v.double(), Strengths(log_decay.double(), now.double(), kept.double())
    )
    torch.testing.assert_close((o.double(), state.double()), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize(
    ("sizes", "segmented"), [*zip(SIZES, [False, True, True, False, True, False, True], strict=True)]
)
def test_kernels_are_as_accurate_as_eager(device: str, sizes: tuple[int, ...], segmented: bool):
    segments = packed(sizes[0], range(3, sizes[1], 11), sizes[1]).to(device) if segmented else None
    assert_kernels(inputs(sizes, device, torch.float32), segments)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("strength", [0.0, 3.0, 100.0])
def test_any_decay(device: str, strength: float):
    tensors = inputs((1, 50, 2, 1, 2, 16, 16, 4), device, torch.float32, strength)
    tensors[3][:, 20::17] = -1e5 if strength else 0.0
    assert_kernels(tensors)


@pytest.mark.usefixtures("poisoned")
@in_interpreter
def test_in_half_precision():
    """The interpreter computes float16 correctly, and bfloat16 not."""
    tensors = inputs((1, 40, 4, 1, 2, 32, 16, 8), "cpu", torch.float16)
    truth, plain = results(None, [x.double() for x in tensors]), results("eager", tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_chunks, "unsupported_by_triton", lambda *_, **__: None)
        found = results("triton", tensors)
    for name, a, b, exact in zip(("o", "final", *NAMES), found, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strength", [0.0, 0.1, 10.0])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1000, 4, 1, 6, 128, 64, 32), (2, 300, 1, 1, 4, 128, 64, 32), (1, 200, 8, 2, 4, 64, 64, 32),
        (2, 150, 3, 1, 2, 40, 24, 7), (1, 77, 2, 3, 3, 128, 128, 64), (2, 50, 5, 1, 2, 16, 16, 1),
    ],
)  # fmt: skip
def test_every_dtype(device: str, dtype: torch.dtype, strength: float, sizes: tuple[int, ...]):
    if dtype == torch.float32 and sizes[5] * sizes[6] > triton_chunks.LARGEST[4]:
        sizes = (*sizes[:6], 64, sizes[7])
    tensors = inputs(sizes, device, dtype, strength)
    assert_kernels(tensors)
    assert_kernels(tensors, packed(sizes[0], range(5, sizes[1], 60), sizes[1]).to(device))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_programs_agree_with_few(device: str, dtype: torch.dtype):
    """A full GPU, where programs of all kinds run side by side, computes what each row computes alone, bit by bit."""
    tensors = inputs((16, 1024, 4, 1, 16, 128, 64, 32), device, dtype)
    whole, again = results("triton", tensors), results("triton", tensors)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    rows = [x if "bias" in name else x[:1] for name, x in zip(NAMES, tensors, strict=True)]
    for name, together, alone in zip(("o", "final", *NAMES), whole, results_of_row(rows, tensors), strict=True):
        assert "bias" in name or torch.equal(together[:1], alone), name


def results_of_row(rows: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """As `results` of the kernels, of the first row alone, with the weights that it has among all."""
    leaves = [x.detach().requires_grad_() for x in rows]
    outputs = run("triton", leaves)
    weights = [draw(90 + i, len(tensors[0]), *x.shape[1:])[:1].to(x) for i, x in enumerate(outputs)]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]


@anywhere
def test_nothing_else_leaks_into_the_results(device: str):
    """Other rows, heads, segments and later tokens change nothing, but for roundings of the sums of log decays."""
    tensors = inputs((2, 40, 3, 1, 2, 16, 16, 4), device, torch.float32)
    segments = packed(2, [19], 40).to(device)

    others = [10 * x for x in tensors]
    for name, x, y in zip(NAMES, others, tensors, strict=True):
        if name in ("q", "k"):
            x[1:, 19:33] = y[1:, 19:33]
        elif name == "v":
            x[1:, 19:33, :, 1:] = y[1:, 19:33, :, 1:]
        elif name != "state":
            x[1:, 19:33, 1:] = y[1:, 19:33, 1:]
        if "bias" in name:
            x[1:] = y[1:]
    (one, _), (other, _) = run("triton", tensors, segments), run("triton", others, segments)
    torch.testing.assert_close(one[1, 19:33, :, 1], other[1, 19:33, :, 1], rtol=1e-5, atol=1e-5)
    assert not torch.isclose(one, other)[:, :19].all()


def test_a_sequence_can_be_read_in_pieces():
    *tensors, state = inputs((2, 20, 3, 1, 2, 6, 5, 2))

    def part(first: int, last: int, before: Tensor) -> tuple[Tensor, Tensor]:
        given = [x if "bias" in name else x[:, first:last] for name, x in zip(NAMES[:-1], tensors, strict=True)]
        return run("auto", [*given, before])

    whole, end = part(0, 20, state)
    found, after = [], state
    for first, last in ((0, 7), (7, 8), (8, 20)):  # in the middle one token, for which there is a step of its own
        o, after = part(first, last, after)
        found.append(o)
    torch.testing.assert_close((torch.cat(found, 1), after), (whole, end))


@in_interpreter
@pytest.mark.parametrize("segmented", [False, True])
def test_the_custom_operator_is_well_formed(segmented: bool):
    *given, angles, state = (x.requires_grad_() for x in inputs((1, 9, 2, 1, 2, 6, 5, 2), dtype=torch.float32))
    cos, sin = (x.detach().requires_grad_() for x in (angles.cos(), angles.sin()))
    segments = packed(1, [4], 9) if segmented else None
    found = torch.library.opcheck(
        torch.ops.basecap.ssd_mimo.default, (*given[:3], [*given[3:], cos, sin, state], segments)
    )
    assert set(found.values()) == {"SUCCESS"}


@in_interpreter
def test_compiled_code_holds_the_operator():
    leaves = [x.requires_grad_() for x in inputs((1, 20, 3, 1, 2, 8, 5, 2), dtype=torch.float32)]
    compiled = torch.compile(partial(run, "triton"), backend="aot_eager", fullgraph=True)
    found, expected = (
        [*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)]
        for outputs in (compiled(leaves), run("triton", leaves))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float32])
def test_queries_and_keys_take_the_dtype_of_the_values(low: torch.dtype):
    q, k, v, log_decay, now, kept, *_ = inputs((1, 5, 2, 1, 2, 6, 5, 0))
    strengths = Strengths(log_decay, now, kept)
    o, state = ssd_mimo(q.half(), k, v.to(low), strengths)
    expected = ssd_mimo(q.half().to(low), k.to(low), v.to(low), strengths)
    assert o.dtype == low and state.dtype == torch.float32
    torch.testing.assert_close((o, state), expected, rtol=0.02, atol=0.02)


def test_what_does_not_match_is_refused():
    q, v, decay = torch.zeros(1, 4, 3, 2, 5), torch.zeros(1, 4, 3, 2, 6), torch.zeros(1, 4, 2)
    strengths, bias, angles = Strengths(decay, decay, decay), torch.zeros(2, 3, 5), torch.zeros(1, 4, 2, 2)
    with pytest.raises(
        ConfigError, match=r"q \(1, 4, 3, 2, 5\) and k \(1, 4, 3, 2, 6\) must both be \[B, T, R, G, K\]"
    ):
        ssd_mimo(q, v, v, strengths)
    with pytest.raises(ConfigError, match=r"v \(1, 4, 2, 2, 6\) must be \[B, T, R, H, V\] with .* = \(1, 4, 3\)"):
        ssd_mimo(q, q, v[:, :, :2], strengths)
    with pytest.raises(ConfigError, match="H a positive multiple of 2 groups"):
        ssd_mimo(q, q, v[:, :, :, :1], strengths)
    with pytest.raises(ConfigError, match="at least one token, and one write"):
        ssd_mimo(q[:, :, :0], q[:, :, :0], v[:, :, :0], strengths)
    with pytest.raises(ConfigError, match=r"kept \(1, 4, 1\) must be \[B, T, H\] = \(1, 4, 2\)"):
        ssd_mimo(q, q, v, strengths._replace(kept=decay[..., :1]))
    with pytest.raises(ConfigError, match=r"k_bias \(2, 3, 4\) must be \[H, R, K\] = \(2, 3, 5\)"):
        ssd_mimo(q, q, v, strengths, heads=Heads(bias, bias[..., :4], angles))
    with pytest.raises(ConfigError, match=r"angles \(1, 4, 2, 3\) must be \[B, T, H, A\].* A at most 2"):
        ssd_mimo(q, q, v, strengths, heads=Heads(bias, bias, torch.zeros(1, 4, 2, 3)))
    one, state = [x[:, :1] for x in (q, q, v)], torch.zeros(1, 2, 5, 6)
    with pytest.raises(ConfigError, match="unknown backend 'cuda'"):
        ssd_mimo(*one, Strengths(*[decay[:, :1]] * 3), state_BHKV=state, backend="cuda")


@in_interpreter
def test_sizes_beyond_the_kernels_run_by_positions():
    q, k, v, log_decay, now, kept, *_ = inputs((1, 5, 9, 1, 1, 8, 4, 0), dtype=torch.float32)
    with recorded() as ran:
        o, _ = ssd_mimo(q, k, v, Strengths(log_decay, now, kept), backend="triton")
    assert "by positions: no Triton kernels by chunks because they take at most 8 writes" in ran["ssd_mimo"]
    torch.testing.assert_close(o, ssd_mimo(q, k, v, Strengths(log_decay, now, kept))[0])

"""The chunked scalar-decay recurrence against its definition in float64."""

import functools

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.ssd import eager, reference, ssd
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate

NAMES = ("o", "state", "dq", "dk", "dv", "dlog_decay", "dstate")

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def on_gpu(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), requires_gpu, test)


def inputs(
    B: int, T: int, G: int, H: int, K: int, V: int, strength: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + H)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in
            [(B, T, G, K), (B, T, G, K), (B, T, H, V), (B, T, H), (B, H, K, V)]]  # fmt: skip
    draw[3] = -strength * draw[3].abs()
    return [x.to(dtype).requires_grad_() for x in draw]


def packed(B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return (torch.rand(B, T, generator=generator) < 0.15).cumsum(1)


def values_and_gradients(function, tensors: list[Tensor], segments: Tensor | None) -> list[Tensor]:
    o, state = function(*tensors[:4], tensors[4], segments)
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (o, state)]
    return [o, state, *torch.autograd.grad([o, state], tensors, seeds)]


@pytest.mark.parametrize("T", [1, 2, 7, 16, 33, 70])
@pytest.mark.parametrize("segmented", [False, True])
def test_eager_equals_the_definition(T: int, segmented: bool):
    tensors = inputs(2, T, 2, 4, 5, 3)
    segments = packed(2, T) if segmented else None
    expected = values_and_gradients(reference.ssd, tensors, segments)
    found = values_and_gradients(lambda *x: eager.ssd(*x, chunk=8), tensors, segments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("T", [1, 40, 300])
@pytest.mark.parametrize("given", [False, True])
def test_without_the_final_state_the_outputs_are_the_same(T: int, given: bool):
    tensors = [x.detach() for x in inputs(1, T, 1, 2, 4, 3)]
    state = tensors[4] if given else None
    o, last = ssd(*tensors[:4], state_BHKV=state)
    alone, nothing = ssd(*tensors[:4], state_BHKV=state, final=False)
    assert torch.equal(o, alone) and last.shape == (1, 2, 4, 3) and nothing.shape == (0,)


@pytest.mark.parametrize("T", [1, 40, 300])
def test_without_the_final_state_its_dtype_is_the_same(T: int):
    tensors = [x.detach().bfloat16() for x in inputs(1, T, 1, 2, 4, 3)]
    assert ssd(*tensors[:4], final=False)[1].dtype == ssd(*tensors[:4])[1].dtype == torch.float32


@pytest.mark.parametrize("segmented", [False, True])
def test_many_chunks_are_carried_block_by_block(monkeypatch: pytest.MonkeyPatch, segmented: bool):
    monkeypatch.setattr(eager, "SPAN", 3)
    tensors = inputs(2, 90, 1, 2, 4, 3, strength=0.1)
    segments = packed(2, 90) // 8 if segmented else None
    expected = values_and_gradients(reference.ssd, tensors, segments)
    found = values_and_gradients(lambda *x: eager.ssd(*x, chunk=8), tensors, segments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 100.0])
def test_float32_is_as_good_as_the_recurrence_in_float32(strength: float):
    exact = inputs(1, 150, 1, 2, 8, 4, strength)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected = values_and_gradients(reference.ssd, exact, None)
    recurrent = values_and_gradients(reference.ssd, single, None)
    chunked = values_and_gradients(eager.ssd, single, None)
    for a, b, truth in zip(chunked, recurrent, expected, strict=True):
        scale = truth.abs().max()
        assert (a - truth).abs().max() <= 2 * (b - truth).abs().max() + 4e-6 * scale


def test_zero_decay_is_linear_attention():
    q, k, v, _, _ = inputs(2, 21, 1, 1, 4, 6)
    o, _ = ssd(q, k, v, torch.zeros(2, 21, 1, dtype=torch.float64))
    weights = torch.einsum("btgk,bsgk->bts", q, k).tril()
    torch.testing.assert_close(o[:, :, 0], weights @ v[:, :, 0])


def test_a_sequence_can_be_read_in_pieces():
    q, k, v, log_decay, state = inputs(2, 50, 1, 2, 4, 3)
    whole, last = ssd(q, k, v, log_decay, state_BHKV=state)
    first, middle = ssd(q[:, :23], k[:, :23], v[:, :23], log_decay[:, :23], state_BHKV=state)
    second, end = ssd(q[:, 23:], k[:, 23:], v[:, 23:], log_decay[:, 23:], state_BHKV=middle)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(end, last)


def test_autocast_does_not_reach_the_states():
    q, k, v, log_decay, _ = inputs(1, 40, 1, 2, 4, 3, dtype=torch.float32)
    plain, _ = ssd(q, k, v, log_decay)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, state = ssd(q, k, v, log_decay)
    assert state.dtype == torch.float32
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_decays_may_be_of_float16(backend: str):
    q, k, v, log_decay, _ = (x.detach() for x in inputs(1, 40, 1, 2, 4, 3, dtype=torch.float32))
    low = log_decay.half()
    low[:, 7], low[:, 20:22] = -torch.inf, torch.finfo(torch.float16).min
    low.requires_grad_()
    o, state = ssd(q, k, v, low, backend=backend)
    exact, last = reference.ssd(*(x.double() for x in (q, k, v, low)))
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(state, last.float())
    assert torch.autograd.grad(o.sum() + state.sum(), low)[0].isfinite().all()


@pytest.mark.parametrize("wrong", ["keys", "heads", "decay", "empty"])
def test_shapes_that_do_not_fit_are_refused(wrong: str):
    q, k, v, log_decay, _ = inputs(1, 4, 2, 4, 3, 3)
    if wrong == "keys":
        k = k[..., :2]
    elif wrong == "heads":
        v = v[:, :, :3]
    elif wrong == "decay":
        log_decay = log_decay[:, :3]
    else:
        q, k, v, log_decay = q[:, :0], k[:, :0], v[:, :0], log_decay[:, :0]
    with pytest.raises(ConfigError):
        ssd(q, k, v, log_decay)


def assert_kernels_accurate(device: str, dtype: torch.dtype, sizes: tuple[int, ...], segments: Tensor | None) -> None:
    """Compare the kernels with float64, their errors with those of the eager path."""
    tensors = inputs(*sizes, strength=0.1)
    low = [x.detach().to(device, dtype if i < 3 else torch.float32) for i, x in enumerate(tensors)]
    ids = None if segments is None else segments.to(device)

    def run(backend: str, given: list[Tensor]) -> list[Tensor]:
        def op(q, k, v, log_decay, state, segments):
            return ssd(q, k, v, log_decay, state_BHKV=state, segments=segments, backend=backend)

        return values_and_gradients(op, [x.detach().requires_grad_() for x in given], ids)

    # The same rounded numbers on all sides: only the computation is judged.
    truth, plain, fused = run("eager", [x.double() for x in low]), run("eager", low), run("triton", low)
    for name, a, b, exact in zip(NAMES, fused, plain, truth, strict=True):
        assert_as_accurate(name, a, b, exact)


@in_interpreter
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1, 1, 3, 2), (2, 2, 1, 1, 3, 2), (2, 150, 2, 4, 8, 5), (1, 128, 1, 2, 16, 20), (1, 70, 1, 10, 70, 4)],
)
def test_kernels_in_the_interpreter(sizes: tuple[int, ...], segmented: bool):
    assert_kernels_accurate("cpu", torch.float32, sizes, packed(*sizes[:2]) // 4 if segmented else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 2, 1, 1, 3, 2), (2, 147, 2, 4, 24, 40), (2, 1024, 1, 24, 128, 64), (1, 300, 1, 2, 64, 128)]
)
@on_gpu
def test_kernels_on_a_gpu(sizes: tuple[int, ...], segmented: bool, dtype: torch.dtype):
    assert_kernels_accurate("cuda", dtype, sizes, packed(*sizes[:2]) // 8 if segmented else None)


@in_interpreter
def test_the_custom_operator_is_well_formed():
    q, k, v, log_decay, state = inputs(2, 9, 1, 2, 4, 3, dtype=torch.float32)
    result = torch.library.opcheck(torch.ops.basecap.ssd.default, (q, k, v, log_decay, state, packed(2, 9)))
    assert set(result.values()) == {"SUCCESS"}


@on_gpu
def test_kernels_are_deterministic_on_a_gpu():
    tensors = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in inputs(2, 1024, 1, 24, 128, 64)]

    def op(q, k, v, log_decay, state, segments):
        return ssd(q, k, v, log_decay, state_BHKV=state, segments=segments)

    runs = [values_and_gradients(op, tensors, None) for _ in range(3)]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def test_states_too_large_for_the_kernels_are_refused():
    q, k, v, log_decay, _ = inputs(1, 4, 1, 1, 300, 40, dtype=torch.float32)
    with pytest.raises(ConfigError, match="300 x 40"):
        ssd(q, k, v, log_decay, backend="triton")

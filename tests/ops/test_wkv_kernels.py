"""The Triton kernels behind wkv4, wkv6 and wkv7: through the interpreter in float32, on a GPU in every dtype."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import wkv4 as package_4
from basecap.ops._dispatch import interpreted
from basecap.ops.wkv4 import operators as operators_4
from basecap.ops.wkv4 import reference as reference_4
from basecap.ops.wkv6 import blocks
from basecap.ops.wkv6 import eager as eager_6
from basecap.ops.wkv6 import operators as operators_6
from basecap.ops.wkv6 import reference as reference_6
from basecap.ops.wkv7 import eager as eager_7
from basecap.ops.wkv7 import reference as reference_7
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._recurrences import Recurrence, assert_as_exact, draw, packed

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


def gradients(run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs and the gradients of their random weighting."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    loss = sum((y * draw(80 + i, *y.shape).to(y)).sum() for i, y in enumerate(out))
    return [y.detach() for y in (*out, *torch.autograd.grad(loss, leaves))]


def assert_kernel(
    kernel: Callable[..., tuple[Tensor, ...]], plain: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]
) -> None:
    """Compare a kernel with plain PyTorch in float32, both with plain PyTorch in float64."""
    truth = gradients(plain, [x.double() for x in inputs])
    for number, (x, y, z) in enumerate(zip(gradients(kernel, inputs), gradients(plain, inputs), truth, strict=True)):
        assert_as_accurate(f"result {number}", x, y, z)


@anywhere
@pytest.mark.parametrize("segments", [None, packed(2, [1, 6, 7, 32], 70)])
def test_wkv4(device: str, segments: Tensor | None):
    x = [2 * draw(0, 2, 70, 7), draw(1, 2, 70, 7), torch.exp(2 * draw(2, 7)), draw(3, 7)]
    x = [part.float().to(device) for part in x]
    segments = None if segments is None else segments.to(device)

    def op(*args):
        return operators_4.wkv4(*args, triton=True)

    assert_as_exact(op, reference_4.wkv4, x, segments=segments)
    assert_as_exact(op, reference_4.wkv4, x, first=draw(5, 2, 2, 7).float().to(device), segments=segments)


@anywhere
@pytest.mark.parametrize("matrix", [False, True])
def test_carry(device: str, matrix: bool):
    B, H, M, K, V = 2, 2, 5, 12, 40
    step = 0.3 * draw(0, B, H, M, K, K) if matrix else draw(0, B, H, M, K).sigmoid()
    inputs = [x.float().to(device) for x in (step, draw(1, B, H, M, K, V), draw(2, B, H, K, V))]

    def kernel(*args):
        states = operators_6.carry(*args)
        return states[:, :, :-1], states[:, :, -1]

    assert_kernel(kernel, blocks.walk, inputs)


def recurrence(which: str, length: int, keys: int, spread: float) -> tuple[Recurrence, Recurrence, list[Tensor]]:
    """Return an op's chunked path, its definition and its inputs in float64."""
    shape = (2, length, 2, keys)
    log_decay = -torch.exp(spread * draw(1, *shape) - 1)
    r, k, v = draw(0, *shape), draw(2, *shape), draw(3, *shape)
    if which == "wkv6":
        return eager_6.wkv6, reference_6.wkv6, [r, k, v, log_decay, draw(4, 2, keys)]
    a = -F.normalize(draw(4, *shape), dim=-1)
    return eager_7.wkv7, reference_7.wkv7, [r, log_decay, k, v, a, -a * draw(5, *shape).sigmoid()]


@anywhere
@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_recurrence(device: str, which: str, spread: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "use_triton", lambda op, backend, x: x.dtype == torch.float32)
    op, definition, inputs = recurrence(which, 45, 8, spread)
    x = [part.float().to(device) for part in inputs]
    first = draw(9, 2, 2, 8, 8).float().to(device)
    assert_as_exact(op, definition, x, first=first)
    assert_as_exact(op, definition, x, segments=packed(2, [1, 20], 45).to(device))


@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [on_gpu])
def test_recurrence_at_size(device: str, dtype: torch.dtype, which: str, monkeypatch: pytest.MonkeyPatch):
    """Kernels against plain PyTorch in the same dtype, both against plain PyTorch in float64."""
    op, _, inputs = recurrence(which, 1000, 64, 1.0)
    low = [x.to(device, dtype) for x in inputs]
    kernel = gradients(op, low)
    truth = gradients(op, [x.double() for x in low])
    monkeypatch.setattr(blocks, "use_triton", lambda op, backend, x: False)
    for number, (x, y, z) in enumerate(zip(kernel, gradients(op, low), truth, strict=True)):
        assert_as_accurate(f"result {number}", x, y, z)


@anywhere
def test_operators(device: str):
    """The operators say the truth about their shapes, mutations and gradients."""
    x = [draw(i, 2, 2, 16, 1, 8).float().to(device).requires_grad_() for i in range(2)]
    log_decay = -draw(2, 2, 2, 16, 8).float().to(device).exp()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operators_6.assemble, (*x, log_decay), test_utils=checks)
    step, added, state = draw(3, 1, 1, 3, 8), draw(4, 1, 1, 3, 8, 8), draw(5, 1, 1, 8, 8)
    carried = [part.float().to(device).requires_grad_() for part in (step, added, state)]
    torch.library.opcheck(operators_6.carry, tuple(carried), test_utils=checks)


@pytest.mark.parametrize("starts", [None, torch.zeros(2, 9, dtype=torch.bool)])
def test_scan_operator(starts: Tensor | None):
    k, v, decay = (x.requires_grad_() for x in (draw(0, 2, 9, 4), draw(1, 2, 9, 4), draw(2, 4).exp()))
    results = torch.library.opcheck(operators_4.scan, (k, v, decay, starts, False))
    assert set(results.values()) == {"SUCCESS"}


def test_backend_that_cannot_run():
    k = draw(0, 1, 3, 4)
    with pytest.raises(ConfigError, match=r"no kernels for torch\.float64|triton is not installed"):
        package_4.wkv4(k, k, k[0, 0].exp(), k[0, 0], backend="triton")

"""The Triton kernels behind wkv6 and wkv7: through the interpreter in float32, on a GPU in every dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import wkv4 as package_4
from basecap.ops import wkv6 as package_6
from basecap.ops import wkv7 as package_7
from basecap.ops._dispatch import interpreted, launch_of
from basecap.ops._recurrence import operators as operators_6
from basecap.ops.wkv4 import operators as operators_4
from basecap.ops.wkv6 import eager as eager_6
from basecap.ops.wkv6 import reference as reference_6
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import eager as eager_7
from basecap.ops.wkv7 import reference as reference_7
from basecap.ops.wkv7 import wkv7
from basecap.testing.marks import requires_gpu
from tests.ops._recurrences import Recurrence, assert_as_exact, draw, packed, results

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=requires_gpu)
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), on_gpu])


#: The ops in plain PyTorch.
EAGER: dict[str, Recurrence] = {"wkv6": eager_6.wkv6, "wkv7": eager_7.wkv7}


def recurrence(which: str, length: int, heads: int, keys: int, spread: float) -> tuple[Recurrence, list[Tensor]]:
    """Return an op's definition and its inputs in float64."""
    shape = (2, length, heads, keys)
    log_decay = -torch.exp(spread * draw(1, *shape) - 1)
    r, k, v = draw(0, *shape), draw(2, *shape), draw(3, *shape)
    if which == "wkv6":
        return reference_6.wkv6, [r, k, v, log_decay, draw(4, heads, keys)]
    a = -F.normalize(draw(4, *shape), dim=-1)
    return reference_7.wkv7, [r, log_decay, k, v, a, -a * draw(5, *shape).sigmoid()]


def kernel(which: str) -> Recurrence:
    """Return the op on its Triton kernels, by the definition's positions."""

    def run(*args):
        *inputs, state, segments = args
        return {"wkv6": wkv6, "wkv7": wkv7}[which](*inputs, state_BHKV=state, segments=segments)

    return run


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels of the recurrence wherever the dtype is float32, on the CPU in the interpreter."""
    for package in (package_6, package_7):
        monkeypatch.setattr(
            package,
            "choose",
            lambda op, backend, families, x, *_: "triton_tokens" if x.dtype == torch.float32 else "eager",
        )


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
@pytest.mark.parametrize(("length", "spread", "cuts"), [(37, 1.0, []), (65, 3.0, [1, 20, 62])])
def test_recurrence(device: str, which: str, length: int, spread: float, cuts: list[int], forced: None):
    definition, inputs = recurrence(which, length, 2, 6, spread)
    x = [part.float().to(device) for part in inputs]
    first, segments = draw(9, 2, 2, 6, 6).float().to(device), packed(2, cuts, length).to(device) if cuts else None
    assert_as_exact(kernel(which), definition, x, eager=EAGER[which], first=first, segments=segments)


@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [on_gpu])
def test_at_size(device: str, dtype: torch.dtype, which: str):
    _, inputs = recurrence(which, 300, 3, 64, 1.0)
    assert_as_exact(kernel(which), EAGER[which], [x.to(device, dtype) for x in inputs])


@pytest.mark.usefixtures("poisoned")
@anywhere
def test_constant_decay(device: str, forced: None):
    """RWKV-5's decay [1, 1, H, K] gets its whole gradient."""
    _, inputs = recurrence("wkv6", 20, 2, 6, 1.0)
    inputs[3] = inputs[3][:1, :1]
    x = [part.float().to(device) for part in inputs]
    assert_as_exact(kernel("wkv6"), eager_6.wkv6, x)


@pytest.mark.usefixtures("poisoned")
@anywhere
@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
def test_spans_of_backward_change_no_bit(device: str, which: str, monkeypatch: pytest.MonkeyPatch):
    """The gradient of the state passes from span to span; two programs add their parts of the other gradients."""
    (_, inputs), starts = recurrence(which, 40, 1, 6, 1.0), packed(2, [1, 12, 34], 40).to(device)
    x = [part.float().to(device) for part in inputs]
    index = 2 if which == "wkv6" else 3
    x[index] = draw(6, 2, 40, 1, 20).float().to(device)
    run = {"wkv6": package_6, "wkv7": package_7}[which].triton_tokens
    first, found = draw(9, 2, 1, 6, 20).float().to(device), []
    monkeypatch.setattr(operators_6, "CHUNK", 16)
    for span in (16, 256):
        monkeypatch.setattr(launch_of("basecap.ops._recurrence"), "SPAN", span)
        found.append(results(getattr(run, which), x, first, starts))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@anywhere
@pytest.mark.parametrize("delta", [False, True])
def test_recurrence_operator(device: str, delta: bool):
    """The operator says the truth about its shapes, mutations and gradient."""
    r, w, k, v, a, b = (part.float().to(device).requires_grad_() for part in recurrence("wkv7", 5, 1, 4, 1.0)[1])
    state = torch.zeros(2, 1, 4, 4, device=device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = (r, w, k, v, *((a, b) if delta else (None, None)), state, None)
    results = torch.library.opcheck(operators_6.recur.overload, inputs, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("packs", [False, True])
def test_average_operator(packs: bool):
    inputs = [x.requires_grad_() for x in (draw(0, 2, 9, 4), draw(1, 2, 9, 4), draw(2, 4).exp(), draw(3, 4))]
    history = (draw(5, 2, 2, 4).requires_grad_(), packed(2, [4], 9)) if packs else (None, None)
    results = torch.library.opcheck(operators_4.average.overload, (*inputs, *history, "eager"))
    assert set(results.values()) == {"SUCCESS"}


def test_backend_that_cannot_run():
    k = draw(0, 1, 3, 4)
    with pytest.raises(ConfigError, match=r"no kernels for torch\.float64|triton is not installed"):
        package_4.wkv4(k, k, k[0, 0].exp(), k[0, 0], backend="triton")

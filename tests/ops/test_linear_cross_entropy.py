"""Cross-entropy without the matrix of logits: against its definition, in values and gradients."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.linear_cross_entropy.eager import rows
from basecap.ops.linear_cross_entropy.reference import linear_cross_entropy as reference
from basecap.ops.linear_cross_entropy.triton_kernels import operators
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(29, 16, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, 29, (3, 7), generator=generator)
    targets[0, :3] = -1
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
def test_mean_loss_and_gradients_are_the_definition(chunk: int):
    hidden, weight, targets = inputs(torch.float64)
    ours = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    expected = reference(hidden, weight, targets)
    torch.testing.assert_close(ours, expected)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, chunk=chunk), ours)
    found = torch.autograd.grad(3 * ours, (hidden, weight))
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_single_losses_average_to_the_mean():
    hidden, weight, targets = inputs(torch.float64)
    single = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk=5)
    assert (single[targets < 0] == 0).all()
    torch.testing.assert_close(single.sum() / (targets >= 0).sum(), reference(hidden, weight, targets))


def test_autocast_error_is_that_of_the_dtype():
    hidden, weight, targets = inputs(torch.float32)
    exact = torch.autograd.grad(reference(hidden.double(), weight.double(), targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        eager = reference(hidden, weight, targets)
    assert loss.dtype == torch.float32
    found, allowed = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(eager, (hidden, weight))
    for ours, theirs, true in zip(found, allowed, exact, strict=True):
        assert (ours - true).norm() <= 2 * (theirs - true).norm()


def test_one_compiled_graph():
    hidden, weight, targets = inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            loss = compiled(hidden, weight, targets)
        assert loss.requires_grad == gradients
        torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets))


def test_all_targets_left_out_gives_zero():
    hidden, weight, targets = inputs(torch.float32)
    assert linear_cross_entropy(hidden, weight, torch.full_like(targets, -1)).item() == 0.0


def test_a_single_token_needs_no_batch_dimension():
    hidden, weight, targets = inputs(torch.float64)
    one, target = hidden[1, 2], targets[1, 2]
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(one, weight, target, reduction=reduction)
        torch.testing.assert_close(loss, reference(one[None], weight, target[None]))


def test_single_losses_keep_no_logits_for_a_gradient():
    hidden, weight, targets = inputs(torch.float64)
    assert not linear_cross_entropy(hidden, weight, targets, reduction="none").requires_grad


KERNELS = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")),
    *(pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.parametrize("vocabulary", [1, 29, 9000])
def test_kernel_is_as_accurate_as_eager(device: str, dtype: torch.dtype, vocabulary: int):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(11, vocabulary, generator=generator)).to(device, dtype)
    targets = torch.randint(0, vocabulary, (11,), generator=generator).to(device)
    targets[3:5] = -1
    count = torch.tensor(9, device=device)
    exact, plain, found = (
        f(x, targets, count) for f, x in ((rows, logits.double()), (rows, logits), (operators.rows, logits))
    )
    for name, ours, eager, true in zip(("losses", "gradient"), found, plain, exact, strict=True):
        assert_as_accurate(name, ours, eager, true)
    assert not found[0][3:5].any()
    assert not found[1][3:5].any()


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
def test_the_kernel_stays_within_its_row(device: str, dtype: torch.dtype):
    """A target that does not exist takes neither the numbers of the next row nor those behind the last one."""
    logits = torch.linspace(-1, 1, 21, device=device).view(3, 7).to(dtype)
    losses, gradient = operators.rows(logits, torch.tensor([7, 2, 30], device=device), torch.tensor(3, device=device))
    assert losses.isnan().tolist() == [True, False, True]
    probabilities = logits.double().softmax(-1) / 3
    probabilities[1, 2] -= 1 / 3
    torch.testing.assert_close(gradient, probabilities.to(dtype))


@pytest.mark.parametrize(("device", "dtype"), KERNELS[:2])
def test_mean_loss_on_kernels(device: str, dtype: torch.dtype):
    low = [x.detach().to(device) for x in inputs(dtype)]
    results = []
    for backend in ("triton", "eager"):
        hidden, weight = (x.clone().requires_grad_() for x in low[:2])
        loss = linear_cross_entropy(hidden, weight, low[2], chunk=4, backend=backend)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("device", "dtype"), KERNELS[:2])
def test_the_operator_keeps_its_promises(device: str, dtype: torch.dtype):
    logits, targets = torch.randn(5, 7, device=device, dtype=dtype), torch.arange(5, device=device)
    torch.library.opcheck(
        operators.rows.overload,
        (logits, targets, torch.tensor(5, device=device)),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: {"hidden": h.tolist()}, r"hidden must be a torch\.Tensor, not list"),
        (lambda h, w, t: {"weight": w.long()}, r"weight must be floating point, not torch\.int64"),
        (lambda h, w, t: {"targets": t[:2]}, "targets"),
        (lambda h, w, t: {"targets": t.tolist()}, r"targets must be a torch\.Tensor, not list"),
        (lambda h, w, t: {"targets": t.float()}, r"targets must be torch\.int64, not torch\.float32"),
        (lambda h, w, t: {"targets": t.to("meta")}, "targets is on meta"),
        (lambda h, w, t: {"weight": w[0]}, "weight"),
        (lambda h, w, t: {"chunk": 0}, "chunk must be an integer of at least 1, not 0"),
        (lambda h, w, t: {"chunk": 8.0}, "chunk must be an integer of at least 1, not 8.0"),
        (lambda h, w, t: {"reduction": "meen"}, "did you mean 'mean'"),
        (lambda h, w, t: {"reduction": "none", "backend": "tritn"}, "did you mean 'triton'"),
    ],
)
def test_bad_inputs_are_named(change, message):
    hidden, weight, targets = inputs(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **change(hidden, weight, targets)}
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(**arguments)

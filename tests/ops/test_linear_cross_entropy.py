"""Cross-entropy without the matrix of logits: against its definition, in values and gradients."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.linear_cross_entropy.reference import linear_cross_entropy as reference


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
    found = torch.autograd.grad(3 * ours, (hidden, weight))
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


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
    loss = compiled(hidden, weight, targets)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets))


def test_all_targets_left_out_gives_zero():
    hidden, weight, targets = inputs(torch.float32)
    assert linear_cross_entropy(hidden, weight, torch.full_like(targets, -1)).item() == 0.0


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, targets = inputs(torch.float32)
    with pytest.raises(ConfigError, match="targets"):
        linear_cross_entropy(hidden, weight, targets[:2])

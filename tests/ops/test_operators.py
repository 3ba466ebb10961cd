"""Operators that are called directly: what callers see is what PyTorch's own way to an operator shows them."""

import pytest
import torch
from torch import Tensor

from basecap.ops.operators import operator

SEEN: list[bool] = []


@operator("basecap_tests::halves")
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and 2 x, parts of other tensors."""
    SEEN.append(x.is_neg())
    return torch.stack([x, x * 0])[0], torch.stack([x * 0, x * 2])[1]


@halves.register_fake
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape)


halves.register_autograd(lambda ctx, first, second: first + 2 * second)


@operator("basecap_tests::multiples")
def multiples(given: list[Tensor], factor: float) -> list[Tensor]:
    """Return the multiples of tensors."""
    return [factor * x for x in given]


@operator("basecap_tests::add_to", mutates_args=("held",))
def add_to(held: Tensor, x: Tensor) -> Tensor:
    """Add x to a tensor, and return twice the sum."""
    held.add_(x)
    return 2 * held


multiples.register_autograd(
    lambda ctx, grads: ([ctx.factor * grad for grad in grads], None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def test_a_list_of_results_has_a_list_of_gradients():
    x, y = torch.ones(2, requires_grad=True), torch.ones(3)
    first, second = multiples([x, y], 3.0)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 3.0))


def test_a_tensor_that_an_operator_changes_is_not_read_as_it_was():
    weight, held = torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (weight * held).sum()
    torch.testing.assert_close(add_to(held, torch.ones(2)), torch.full((2,), 4.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("graph", [True, False])
def test_results_may_be_changed_in_place(graph: bool):
    x, weight = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    with torch.set_grad_enabled(graph):
        first, second = halves(x)
    first.mul_(weight)
    second.add_(1)
    (first + second).sum().backward()
    torch.testing.assert_close(second.detach(), torch.full((3,), 3.0))
    torch.testing.assert_close(weight.grad, torch.ones(3))
    if graph:
        torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


def test_a_function_reads_the_numbers_of_a_tensor_that_stands_for_its_negative():
    SEEN.clear()
    first, _ = halves(torch._neg_view(torch.ones(2)))
    assert SEEN == [False]
    torch.testing.assert_close(first, -torch.ones(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_holds_the_operator():
    traced = torch.jit.trace(lambda x: halves(x)[0], torch.ones(2))
    assert "basecap_tests::halves" in str(traced.graph)

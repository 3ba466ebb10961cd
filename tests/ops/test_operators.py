"""Operators that are called directly: what callers see is what PyTorch's own way to an operator shows them."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from basecap.ops._kinds import kinds_of
from basecap.ops.operators import Direct, operator

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


@operator("basecap_tests::product_backward")
def product_backward(grad: Tensor, saved: list[Tensor]) -> list[Tensor]:
    """Return the gradients of x and y."""
    x, y, _ = saved
    return [grad * y, grad * x]


def product_of_parts(x: Tensor, given: list[Tensor | None], by_operators: bool) -> tuple[Tensor, Tensor]:
    """Return x y, and what the backward pass saves beside these."""
    y, none = given
    assert none is None
    SEEN.append(by_operators)
    return x * y, x + y


product = Direct(
    "product",
    lambda x, given: product_of_parts(x, given, False),
    seen=lambda x, given: product_of_parts(x, given, True)[0],
    first=True,
)
product.register_autograd(
    lambda ctx, grad: (lambda dx, dy: (dx, [dy, None]))(*product_backward(grad, ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], inputs[1][0], output[1]),
)


@pytest.mark.parametrize("hooks", [False, True])
def test_callers_get_the_first_result_of_a_direct_call(hooks: bool):
    """Hooks may lay saved tensors out in another way."""
    SEEN.clear()
    found = []
    for turned in (False, hooks, False):
        x, y = (torch.arange(6.0).view(2, 3).requires_grad_() for _ in range(2))
        pack = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t.T.contiguous().T)
        with pack if turned else contextlib.nullcontext():
            out = product(x, [y, None])
        out.sum().backward()
        assert torch.equal(out, x * y) and torch.equal(x.grad, y) and torch.equal(y.grad, x)
        found.append(out)
    assert SEEN == [False] * 3 and torch.equal(product(x.detach(), [y.detach(), None]), found[0])


def test_a_mode_sees_operators_instead_of_a_direct_call():
    SEEN.clear()
    x = torch.ones(2)
    with FlopCounterMode(display=False):
        product(x, [x, None])
    product(torch._neg_view(x), [x, None])
    assert SEEN == [True, True]


@pytest.mark.parametrize("unpack", [lambda x: x.double(), lambda x: x[:1], lambda x: x.T.contiguous().T])
def test_what_hooks_make_of_saved_tensors_has_a_record_of_its_own(unpack: Callable[[Tensor], Tensor]):
    records = product_backward._direct.replayed.records
    records.clear()
    for hook in (lambda x: x, unpack):
        x = torch.ones(2, 3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), hook):
            out = product(x, [torch.ones(2, 3), None])
        out.sum().backward()
    assert len(records) == 2


def test_autograd_names_the_operator():
    x = torch.ones(2, requires_grad=True)
    assert type(halves(x)[0].grad_fn).__name__ == "halvesBackward"
    assert type(product(x, [x, None]).grad_fn).__name__ == "productBackward"


def test_what_tells_arguments_apart():
    x, wide = torch.zeros(4, 6), torch.zeros(4, 7)
    given = [
        (x, x.clone()), (x, x), (x, x.T), (x, wide[:, :6]), (x, wide[:, 1:]), (x, x.half()), ([x], x.clone()),
        (x, None), (None, x), (x, 1), (x, 1.0), (x, True), (x, 0.0), (x, -0.0), (x, "1"), (x, [1]), (x, []),
        (x, float("nan")),
    ]  # fmt: skip
    kinds = [kinds_of(each, []) for each in given]
    assert None not in kinds and len({*kinds}) == len(given)
    assert kinds == [kinds_of(each, []) for each in given]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_kind():
    x = torch.ones(2, 2)
    nested = torch.nested.nested_tensor([x, x[:1]])
    functional = torch._to_functional_tensor(x)
    kinds = (x.to("meta"), x.to_sparse(), torch._neg_view(x), torch._efficientzerotensor(2), nested, functional)
    for other in (*kinds, x[:0].to("meta"), torch.float32, MyTensor(x)):
        assert kinds_of((x, [other]), []) is None
    torch.vmap(lambda row: SEEN.append(kinds_of((row,), []) is None) or row)(x)
    assert SEEN.pop()


class MyTensor(torch.Tensor):
    """A tensor of somebody else's."""

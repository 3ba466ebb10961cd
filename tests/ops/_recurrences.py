"""How a fast path of a recurrence is compared with its definition: outputs, final state and every gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from basecap.testing.tolerance import assert_as_accurate

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def draw(seed: int, *shape: int) -> Tensor:
    """Return standard normal float64 values."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def results(op: Recurrence, inputs: Sequence[Tensor], state: Tensor | None, segments: Tensor | None) -> list[Tensor]:
    """Return outputs, final state and the gradients of all inputs (and of the state).

    The loss weighs outputs and finite entries of the state at random.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *(() if state is None else (state,)))]
    first = None if state is None else leaves[-1]
    o, final = op(*leaves[: len(inputs)], first, segments)
    loss = (o.double() * draw(90, *o.shape).to(o.device)).sum()
    loss = loss + (final.double() * draw(91, *final.shape).to(o.device)).masked_fill(final == -torch.inf, 0.0).sum()
    return [x.detach() for x in (o, final, *torch.autograd.grad(loss, leaves))]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare two float64 results to rounding."""
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def assert_as_exact(
    op: Recurrence,
    reference: Recurrence,
    inputs: Sequence[Tensor],
    *,
    first: Tensor | None = None,
    segments: Tensor | None = None,
    eager: Recurrence | None = None,
) -> None:
    """Compare a path in the inputs' dtype with the definition in float64, its errors with those of `eager`.

    Without `eager`, with those of the definition in the inputs' dtype.
    """
    # The same rounded numbers on both sides: only the computation is judged.
    wide = [x.double() for x in inputs]
    truth = results(reference, wide, None if first is None else first.double(), segments)
    plain = results(eager or reference, inputs, first, segments)
    actual = results(op, inputs, first, segments)
    for number, (x, y, z) in enumerate(zip(actual, plain, truth, strict=True)):
        assert_as_accurate(f"result {number}", x, y, z)


def packed(batch: int, cuts: Sequence[int], length: int) -> Tensor:
    """Return [batch, length] segment ids with boundaries at `cuts`."""
    marks = torch.zeros(length, dtype=torch.int64)
    marks[list(cuts)] = 1
    return marks.cumsum(0).expand(batch, length)

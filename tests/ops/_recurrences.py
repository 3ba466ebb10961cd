"""How a fast path of a recurrence is compared with its definition: outputs, final state and every gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def draw(seed: int, *shape: int) -> Tensor:
    """Return standard normal float64 values."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def results(op: Recurrence, inputs: Sequence[Tensor], state: Tensor | None, segments: Tensor | None) -> list[Tensor]:
    """Return outputs, final state and the gradients of all inputs (and of the state), in float64.

    The loss weighs outputs and finite entries of the state at random.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *(() if state is None else (state,)))]
    first = None if state is None else leaves[-1]
    o, final = op(*leaves[: len(inputs)], first, segments)
    loss = (o.double() * draw(90, *o.shape).to(o.device)).sum()
    loss = loss + (final.double() * draw(91, *final.shape).to(o.device)).masked_fill(final == -torch.inf, 0.0).sum()
    return [x.detach().double() for x in (o, final, *torch.autograd.grad(loss, leaves))]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare two float64 results to rounding."""
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def assert_as_exact(actual: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor], ulp: float) -> None:
    """The largest error of each result is at most twice that of the plain computation in the same dtype.

    A plain result that happens to be exact still leaves `ulp` of the largest value.
    """
    for number, (x, y, z) in enumerate(zip(actual, plain, truth, strict=True)):
        finite = z.isfinite()
        assert (x[~finite] == z[~finite]).all(), f"result {number} differs where it is infinite"
        x, y, z = x[finite], y[finite], z[finite]
        error, excused = (x - z).abs().max(), (y - z).abs().max()
        assert error <= 2 * excused + ulp * z.abs().max(), f"result {number}: error {error:.2e}, plain {excused:.2e}"


def packed(batch: int, cuts: Sequence[int], length: int) -> Tensor:
    """Return [batch, length] segment ids with boundaries at `cuts`."""
    marks = torch.zeros(length, dtype=torch.int64)
    marks[list(cuts)] = 1
    return marks.cumsum(0).expand(batch, length)

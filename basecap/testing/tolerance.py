"""The tolerance of every kernel and chunked path: earned by comparison, not chosen (as flash-attention's tests do)."""

import torch
from torch import Tensor


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return ||value - exact|| / ||exact|| in float64; ||value|| where exact is zero."""
    exact = exact.detach().cpu().double()
    difference = value.detach().cpu().double() - exact
    return (difference.norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def largest_error(value: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference, in float64."""
    return (value.detach().cpu().double() - exact.detach().cpu().double()).abs().max().item()


def assert_as_accurate(name: str, value: Tensor, plain: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Raise AssertionError unless `value` errs at most `factor` times as much as `plain`.

    The error is taken in the mean (relative to the norm) and at the worst place. Two units in the last place of the
    largest number are always allowed: `plain` may be right by luck.

    Args:
        name: what is compared, for the message.
        value: the result of the kernel or the chunked path.
        plain: the result of plain PyTorch in the same dtype.
        exact: the definition evaluated in float64.
        factor: how much worse than `plain` the value may be.
    """
    assert value.dtype == plain.dtype, f"{name} is {value.dtype}, not {plain.dtype}"
    assert torch.isfinite(value).all(), f"{name} is not finite everywhere"
    numbers = torch.finfo(plain.dtype)
    rounding = 2 * numbers.eps
    mean, allowed = relative_error(value, exact), factor * relative_error(plain, exact) + rounding
    assert mean <= allowed, f"{name} errs by {mean:.3g} of its norm; at most {allowed:.3g} is allowed"
    worst = largest_error(value, exact)
    # Below the smallest normal number the last place has the same unit everywhere.
    largest = max(exact.detach().abs().max().item(), numbers.tiny)
    allowed = factor * largest_error(plain, exact) + rounding * largest
    assert worst <= allowed, f"{name} errs by {worst:.3g} at its worst place; at most {allowed:.3g} is allowed"

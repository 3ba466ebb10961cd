"""The proof that backward is the derivative of forward, in float64."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from basecap.testing._harness import Check, Harness, Layers


def derivatives(harness: Harness) -> Iterator[Check]:
    """Backward is the derivative of forward: central differences along a random direction per parameter.

    All directions at once come first, as the sum shows any error that one of them would; each alone finds the place.
    """
    grads = gradients(harness.layers, harness.x, harness.weight)
    taught = grads.keys() | _taught(harness.layers, harness.x)
    lost = sorted(harness.own_name(name) for name in dict(harness.layers.named_parameters()).keys() - taught)
    yield harness.check("every parameter learns", len(lost), 0.0, f"no gradient reaches {', '.join(lost)}")
    if not all(mixer.exact_gradient for mixer in harness.layers.mixers):
        return
    point = {"x": harness.x, **{name: p.detach() for name, p in harness.layers.named_parameters()}}
    name, (error, allowed) = "x", _derivative_error(harness, point, grads)
    if not error <= allowed:
        rows = [(name, *_derivative_error(harness, point, {name: grad})) for name, grad in grads.items()]
        name, error, allowed = worst(rows)
    broken = f"the gradient of {harness.own_name(name)} differs from the numerical derivative"
    yield harness.check("derivatives", error, allowed, broken)


def _taught(layers: Layers, x: Tensor) -> set[str]:
    """Return the names of the parameters that a gradient of an auxiliary loss reaches."""
    losses, wanted = layers.losses(x), dict(layers.named_parameters())
    if not losses:
        return set()
    total = torch.stack([*losses.values()]).sum()
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return {name for name, grad in zip(wanted, found, strict=True) if grad is not None}


def worst(rows: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """Return the (name, error, allowed) with the largest ratio of error to allowed, a NaN before all others."""
    return max(rows, key=lambda row: math.inf if math.isnan(row[1]) else row[1] / row[2])


@torch.no_grad()
def _derivative_error(
    harness: Harness, point: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> tuple[float, float]:
    """Return (error, allowed) of the derivative along directions in `grads`, both relative to the gradients' size."""
    directions = {name: harness.random(f"direction {name}", *point[name].shape) for name in grads}

    def loss(distance: float) -> tuple[float, float]:
        there = {**point, **{name: point[name] + distance * along for name, along in directions.items()}}
        terms = torch.func.functional_call(harness.layers, there, (there.pop("x"),)) * harness.weight
        return terms.sum().item(), terms.abs().sum().item()

    h = 1e-6
    (ahead, size), (behind, _) = loss(h), loss(-h)
    (far_ahead, _), (far_behind, _) = loss(2 * h), loss(-2 * h)
    near, far = (ahead - behind) / (2 * h), (far_ahead - far_behind) / (4 * h)
    # Richardson: (near - far) / 3 is the truncation error of `near`; the loss itself is known to rounding.
    slope = sum((grad * directions[name]).sum().item() for name, grad in grads.items())
    error, truncation = abs(near - slope), abs(near - far) / 3
    allowed = harness.slack(torch.float64) * truncation + harness.allowed * size / h
    size_of = [torch.linalg.vector_norm(grad).item() for grad in grads.values()]
    scale = max(math.hypot(*size_of), torch.finfo(torch.float64).tiny)
    return error / scale, allowed / scale


def gradients(
    layers: nn.Module, x: Tensor, weight: Tensor, run: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the gradients of sum(weight * layers(x)) by parameter name, and that of the input as "x".

    Parameters that no gradient reaches are left out. `run` stands for a compiled form of `layers`.
    """
    x = x.detach().clone().requires_grad_()
    wanted = {"x": x, **dict(layers.named_parameters())}
    y = layers(x) if run is None else run(x)
    loss = (y.to(weight.dtype) * weight).sum()
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}

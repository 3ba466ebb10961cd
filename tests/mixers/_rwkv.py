"""What the tests of the RWKV mixers share."""

import torch
from torch import Tensor

from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise


def draw(seed: int, *shape: int) -> Tensor:
    """Return standard normal float64 values."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(name: str, hidden: int = 32, index: int = 1, depth: int = 3, **options: object) -> Mixer:
    """Return a mixer in float64, as initialised but with every parameter moved off its start."""
    module = fresh(name, hidden, index, depth, **options)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter += 0.2 * draw(number, *parameter.shape)
    return module


def fresh(name: str, hidden: int = 32, index: int = 1, depth: int = 3, **options: object) -> Mixer:
    """Return a mixer in float64 as initialised."""
    choice = ARCHITECTURES.get(name).layers[0]
    spec = LayerSpec(hidden=hidden, index=index, depth=depth)
    module = choice.mixer(choice.configure(hidden, options), spec).to(torch.float64)
    initialise(module, module.recipe(), 0)
    return module


def outputs_and_gradients(run, x: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Return run(x) and the gradients of a random weighting of it with respect to x and `wanted`."""
    x = x.clone().requires_grad_()
    y = run(x)
    return [y, *torch.autograd.grad((y * draw(99, *y.shape)).sum(), [x, *wanted])]


def previous(x_BTD: Tensor) -> Tensor:
    """Return the tokens one place later, zero first."""
    return torch.cat([torch.zeros_like(x_BTD[:, :1]), x_BTD[:, :-1]], dim=1)


def normalised(o_BTHV: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return [B, T, H * V]: every head to mean 0 and variance 1 (epsilon 64e-5), times gain plus bias."""
    centred = o_BTHV - o_BTHV.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 64e-5).sqrt()
    return unit.flatten(2) * gain + bias

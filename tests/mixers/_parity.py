"""Compares a mixer with an independent implementation: the formulas of its paper, or a module of transformers."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from basecap.mixers import Mixer
from basecap.testing.tolerance import assert_as_accurate


def assert_equals_paper(
    mixer: Mixer, paper: Callable[[Mixer, Tensor], Tensor], *, length: int = 75, tolerance: float = 1e-9
) -> None:
    """Assert that outputs and all gradients on one sequence are those of `paper`, which takes x [T, 12].

    Args:
        mixer: of width 12, in float64.
        paper: computes the outputs from the mixer's parameters.
        length: tokens of the sequence.
        tolerance: relative, of gradients; that of outputs is 1e-9.
    """
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, length, 12, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    wanted = [x, *mixer.parameters()]
    ours, theirs = mixer(x[None])[0], paper(mixer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    gradients = (torch.autograd.grad((output * weight).sum(), wanted) for output in (ours, theirs))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance / 1000)


def assert_equals_module(ours: Mixer, theirs: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Assert that outputs and gradients are those of a module whose decays are computed in float32.

    Args:
        ours: the mixer, in float64.
        theirs: the other module, which gets the mixer's parameters.
        pairs: every parameter of `ours` with that of `theirs`.
    """
    assert len(pairs) == len(list(ours.parameters())) == len(list(theirs.parameters()))
    with torch.no_grad():
        for own, other in pairs:
            other.copy_(own.reshape(other.shape))
    x, weight = (
        torch.randn(2, 21, ours.layer.hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in (1, 2)
    )
    results = []
    for module in (ours, theirs):
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        (output * weight).sum().backward()
        results.append((output, inputs.grad))
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-6)
    for own, other in pairs:
        torch.testing.assert_close(own.grad, other.grad.reshape(own.shape), rtol=1e-4, atol=1e-5)


def assert_compiled_is_as_accurate(mixer: Mixer, *, length: int) -> None:
    """Assert that compiled in bfloat16 on a GPU a mixer errs at most twice as much as uncompiled, and its gradients.

    Args:
        mixer: in float64, on the CPU.
        length: tokens of each of two sequences.
    """
    low, generator = copy.deepcopy(mixer).float().cuda(), torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 2, length, mixer.layer.hidden, generator=generator, dtype=torch.float64)

    def results(run: Callable[[Tensor], Tensor], of: Mixer, x: Tensor) -> list[Tensor]:
        output = run(x.requires_grad_())
        return [output, *torch.autograd.grad(output, [x, *of.parameters()], weight.to(output))]

    torch.compiler.reset()
    exact = results(mixer, mixer, x.clone())
    with torch.autocast("cuda", torch.bfloat16):
        plain = results(low, low, x.float().cuda())
        compiled = results(torch.compile(low, dynamic=False), low, x.float().cuda())
    names = ["output", "input", *(name for name, _ in mixer.named_parameters())]
    for given in zip(names, compiled, plain, exact, strict=True):
        assert_as_accurate(*given)

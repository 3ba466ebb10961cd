"""Finds the module that makes a loss infinite or NaN, and describes what was found."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from basecap.models.blocks import Block, total


def first_bad_module(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> str | None:
    """Return the first parameter or module, in the order of computation, with NaN or infinity, such as "module head".

    Returns None if a forward pass over these tokens has neither.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {name}"
    bad: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, tuple, object], None]:
        def check_output(module: nn.Module, inputs: tuple, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            held = (total(*parts[:2]),) if isinstance(module, Block) and isinstance(output, tuple) else parts
            if any(isinstance(part, Tensor) and not part.isfinite().all() for part in held):
                bad.append(name)

        return check_output

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss = model(tokens_BT, targets_BT)
    finally:
        for handle in handles:
            handle.remove()
    if bad:
        return f"module {bad[0]}"
    return None if loss.isfinite() else "the loss of finite activations"


def describe_fault(what: Literal["loss", "gradients"], step: int, found: Sequence[str | None]) -> str:
    """Return the sentence for a loss or gradients that are not finite at a step.

    Args:
        what: is not finite.
        step: the step, the first being 1.
        found: what `first_bad_module` returned in each process.
    """
    bad = [(rank, where) for rank, where in enumerate(found) if where is not None]
    if bad:
        rank, where = bad[0]
        where += f" in process {rank}" if len(found) > 1 else ""
    elif what == "gradients":
        where = "the backward pass"
    else:  # for example compiled code that computes differently, or a module with hidden state
        every = "any module of any process" if len(found) > 1 else "any module"
        where = f"not found in {every} when the forward passes of this step are repeated"
    return f"the {what} stopped being finite at step {step}; first bad: {where}. Lower train.lr or fix that module."

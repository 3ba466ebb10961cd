"""Finds the module that makes a loss infinite or NaN."""

from collections.abc import Callable

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
            held = (total(*parts),) if isinstance(module, Block) and isinstance(output, tuple) else parts
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

"""The case of the cross-entropy of a linear head."""

from functools import partial

import torch
from torch import Tensor

from basecap.ops.cases import B, Case, D, Draw, Function
from basecap.ops.linear_cross_entropy import FAMILIES, linear_cross_entropy, reference

FUNCTIONS = ("rows",)
VOCABULARY = 300


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {"hidden": draw(B * T, D), "weight": draw(VOCABULARY, D)}


def _loss(op: Function, hidden: Tensor, weight: Tensor) -> Tensor:
    loss: Tensor = op(hidden, weight, torch.arange(len(hidden), device=hidden.device) % VOCABULARY)
    return loss


CASES = {
    "linear cross entropy": Case(
        kernels=partial(_loss, partial(linear_cross_entropy, backend="triton")),
        plain=partial(_loss, partial(linear_cross_entropy, backend="eager")),
        definition=partial(_loss, reference.linear_cross_entropy),
        inputs=_inputs,
        families=FAMILIES,
    )
}

"""The cases of the delta rule by channel: one strength for each head, and erasing strengths by channel."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from basecap.ops.cases import B, Case, Draw, Function, H, K, by_backend
from basecap.ops.channel_delta_rule import FAMILIES, channel_delta_rule, decoupled_delta_rule, reference

FUNCTIONS = ("channel_delta_rule",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    rate, strength = draw(B, T, H, K).abs(), draw(B, T, H).sigmoid()
    return {"q": q, "k": k, "v": draw(B, T, H, K), "beta": strength, "log_decay": -0.1 * rate}


def _decoupled_inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k, v, _, log_decay = _inputs(draw, T).values()
    return {"q": q, "k": k, "v": v, "erase": draw(B, T, H, K).sigmoid(), "log_decay": log_decay}


def _definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    return reference.channel_delta_rule(q, k, beta[..., None] * v, beta[..., None] * k, log_decay)


def _decoupled(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    return reference.channel_delta_rule(q, k, v, erase * k, log_decay)


def _case(
    op: Function, definition: Function, inputs: Callable[[Draw, int], Mapping[str, Tensor]], strength: str
) -> Case:
    # Most products of the chunks are in the dtype of the tensors.
    return replace(by_backend(op, definition, inputs, FAMILIES, (strength, "log_decay")), half=True)


CASES = {
    "delta rule by channel": _case(channel_delta_rule, _definition, _inputs, "beta"),
    "delta rule, decoupled": _case(decoupled_delta_rule, _decoupled, _decoupled_inputs, "erase"),
}

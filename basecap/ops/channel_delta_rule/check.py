"""The cases of the delta rule by channel: one strength for each head, and erasing strengths by channel."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from basecap.ops.cases import B, Case, Draw, Function, H, K
from basecap.ops.channel_delta_rule import (
    FAMILIES,
    channel_delta_rule,
    decoupled_delta_rule,
    eager,
    reference,
)

FUNCTIONS = ("channel_delta_rule",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    rate, strength = draw(B, T, H, K).abs(), draw(B, T, H).sigmoid()
    return {"q": q, "k": k, "v": draw(B, T, H, K), "beta": strength, "log_decay": -0.1 * rate}


def _decoupled_inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k, v, _, log_decay = _inputs(draw, T).values()
    return {"q": q, "k": k, "v": v, "erase": draw(B, T, H, K).sigmoid(), "log_decay": log_decay}


def _with_strengths(run: Function) -> Function:
    def strengthened(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        erased, written = ((beta[..., None] * x).to(x.dtype) for x in (k, v))
        out: tuple[Tensor, Tensor] = run(q, k, written, erased, log_decay)
        return out

    return strengthened


def _with_erasing(run: Function) -> Function:
    def erasing(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = run(q, k, v, (erase * k).to(k.dtype), log_decay)
        return out

    return erasing


def _case(
    op: Function,
    given: Callable[[Function], Function],
    inputs: Callable[[Draw, int], Mapping[str, Tensor]],
    strength: str,
) -> Case:
    return Case(
        kernels=op,
        plain=given(eager.channel_delta_rule),
        definition=given(reference.channel_delta_rule),
        inputs=inputs,
        wide=(strength, "log_decay"),
        cuda=True,
        half=True,
        families=FAMILIES,
    )


CASES = {
    "delta rule by channel": _case(channel_delta_rule, _with_strengths, _inputs, "beta"),
    "delta rule, decoupled": _case(decoupled_delta_rule, _with_erasing, _decoupled_inputs, "erase"),
}

"""The cases of attention with forget gates: gates that stay open, and gates that close soon."""

from functools import partial

from torch import Tensor

from basecap.ops.cases import B, Case, Draw, H, K, by_backend
from basecap.ops.forgetting_attention import FAMILIES, forgetting_attention, reference

FUNCTIONS = ("attention",)


def _inputs(size: float, draw: Draw, T: int) -> dict[str, Tensor]:
    heads = {name: draw(B, T, H, K) for name in ("q", "k", "v")}
    return {**heads, "log_decay": -size * draw(B, T, H).abs()}


def _case(size: float) -> Case:
    definition = partial(reference.attention, scale=K**-0.5)
    return by_backend(forgetting_attention, definition, partial(_inputs, size), FAMILIES, wide=("log_decay",))


CASES = {"forgetting attention": _case(0.05), "forgetting attention, closing": _case(1.0)}

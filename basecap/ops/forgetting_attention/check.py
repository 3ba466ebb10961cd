"""The cases of attention with forget gates: gates that stay open, and gates that close soon."""

from functools import partial

from torch import Tensor

from basecap.ops.cases import B, Case, Draw, H, K
from basecap.ops.forgetting_attention import FAMILIES, eager, forgetting_attention, reference

FUNCTIONS = ("attention",)
#: Tokens of whole tiles.
WHOLE = 512


def _inputs(size: float, whole: bool, draw: Draw, T: int) -> dict[str, Tensor]:
    T = WHOLE if whole else T
    heads = {name: draw(B, T, H, K) for name in ("q", "k", "v")}
    return {**heads, "log_decay": -size * draw(B, T, H).abs()}


def _case(size: float) -> Case:
    return Case(
        plain=forgetting_attention,
        definition=partial(reference.attention, scale=K**-0.5),
        inputs=partial(_inputs, size, False),
        families=FAMILIES,
        wide=("log_decay",),
    )


CASES = {
    "forgetting attention": _case(0.05),
    # On a GPU, lengths of whole tiles run on FlexAttention; here the first tiles are closed for the last.
    "forgetting attention, whole tiles": Case(
        kernels=forgetting_attention,
        plain=partial(eager.attention, scale=K**-0.5, segments=None),
        definition=partial(reference.attention, scale=K**-0.5),
        inputs=partial(_inputs, 1.0, True),
        families=FAMILIES,
        wide=("log_decay",),
        cuda=True,
    ),
}

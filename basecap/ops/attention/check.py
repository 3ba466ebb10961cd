"""The cases of softmax attention: full, and with a window."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from basecap.ops.attention import FAMILIES, attention, eager, reference
from basecap.ops.cases import B, Case, Draw, H, K

FUNCTIONS = ("attention",)
WINDOW = 50
#: Tokens of whole tiles.
WHOLE = 256


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {name: draw(B, T, heads, K) for name, heads in (("q", 2 * H), ("k", H), ("v", H))}


def _case(window: int | None) -> Case:
    return Case(
        plain=partial(attention, window=window),
        definition=partial(reference.attention, scale=K**-0.5, window=window),
        inputs=_inputs,
        families=FAMILIES,
    )


CASES = {
    "attention": _case(None),
    "attention window": _case(WINDOW),
    # On a GPU, lengths of whole tiles run on FlexAttention.
    "attention window, whole tiles": replace(
        _case(WINDOW),
        inputs=lambda draw, T: _inputs(draw, WHOLE),
        kernels=partial(attention, window=WINDOW),
        plain=partial(eager.attention, scale=K**-0.5, window=WINDOW, slopes=None, segments=None),
        cuda=True,
    ),
}

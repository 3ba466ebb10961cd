"""The case of the short convolution."""

from functools import partial

from torch import Tensor

from basecap.ops.cases import B, D, Draw, by_backend
from basecap.ops.short_convolution import FAMILIES, reference, short_convolution

FUNCTIONS = ("short_convolution",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {"x": draw(B, T, D), "weight": 0.5 * draw(D, 4), "bias": draw(D)}


CASES = {
    "short convolution": by_backend(
        partial(short_convolution, activation="silu"),
        partial(reference.short_convolution, activation="silu"),
        _inputs,
        FAMILIES,
        ("weight", "bias"),
    )
}

"""The case of the long convolution."""

from torch import Tensor

from basecap.ops.cases import B, D, Draw, by_backend
from basecap.ops.long_convolution import FAMILIES, long_convolution, reference

FUNCTIONS = ("long_convolution",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {"u": draw(B, T, D), "filter": draw(T, D)}


CASES = {"long convolution": by_backend(long_convolution, reference.long_convolution, _inputs, FAMILIES, ("filter",))}

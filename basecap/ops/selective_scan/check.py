"""The case of the selective scan."""

from torch import Tensor

from basecap.ops.cases import B, D, Draw, N, by_backend
from basecap.ops.selective_scan import FAMILIES, reference, selective_scan

FUNCTIONS = ("forward", "backward")


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {
        "x": draw(B, T, D),
        "dt": 0.2 * draw(B, T, D).abs(),
        "A": -draw(D, N).abs(),
        "B": draw(B, T, N),
        "C": draw(B, T, N),
    }


CASES = {"selective scan": by_backend(selective_scan, reference.selective_scan, _inputs, FAMILIES, ("dt", "A"))}

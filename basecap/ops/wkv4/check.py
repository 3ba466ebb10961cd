"""The case of the recurrence of RWKV-4."""

from torch import Tensor

from basecap.ops.cases import B, D, Draw, by_backend
from basecap.ops.wkv4 import FAMILIES, reference, wkv4

FUNCTIONS = ("forward", "backward")


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {"k": draw(B, T, D), "v": draw(B, T, D), "decay": draw(D).exp(), "bonus": draw(D)}


CASES = {"wkv4": by_backend(wkv4, reference.wkv4, _inputs, FAMILIES)}

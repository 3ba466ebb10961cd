"""The case of state-space duality."""

from torch import Tensor

from basecap.ops.cases import B, Draw, H, K, by_backend
from basecap.ops.ssd import FAMILIES, reference, ssd

FUNCTIONS = ("ssd",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = draw(B, T, 1, K), draw(B, T, 1, K)
    return {"q": q, "k": k, "v": draw(B, T, H, K), "log_decay": -0.1 * draw(B, T, H).abs()}


CASES = {"ssd": by_backend(ssd, reference.ssd, _inputs, FAMILIES, ("log_decay",))}

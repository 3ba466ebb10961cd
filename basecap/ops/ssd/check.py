"""The cases of state-space duality: one write and read for each token, and several."""

from torch import Tensor

from basecap.ops._dispatch import Backend
from basecap.ops.cases import B, Draw, H, K, by_backend
from basecap.ops.ssd import FAMILIES, reference, ssd, ssd_mimo

FUNCTIONS = ("ssd",)

#: Writes and reads of a token.
R = 3


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = draw(B, T, 1, K), draw(B, T, 1, K)
    return {"q": q, "k": k, "v": draw(B, T, H, K), "log_decay": -0.1 * draw(B, T, H).abs()}


def _mimo_inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k, v = (draw(B, T, R, H, K) for _ in range(3))
    log_decay, now, kept = (draw(B, T, H).abs() for _ in range(3))
    return {"q": q, "k": k, "v": v, "log_decay": -0.1 * log_decay, "now": now, "kept": kept}


def _mimo(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, now: Tensor, kept: Tensor, *, backend: Backend
) -> tuple[Tensor, Tensor]:
    return ssd_mimo(q, k, v, log_decay, (now, kept), backend=backend)


def _mimo_definition(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, now: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.ssd_mimo(q, k, v, log_decay, (now, kept))


CASES = {
    "ssd": by_backend(ssd, reference.ssd, _inputs, FAMILIES, ("log_decay",)),
    "ssd mimo": by_backend(_mimo, _mimo_definition, _mimo_inputs, FAMILIES, ("log_decay", "now", "kept")),
}

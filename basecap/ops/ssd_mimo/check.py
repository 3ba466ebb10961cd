"""The case of the state space of several writes and reads: with queries and keys of heads as Mamba-3 has them."""

from torch import Tensor

from basecap.ops._dispatch import Backend
from basecap.ops.cases import B, Draw, H, K, by_backend
from basecap.ops.ssd_mimo import FAMILIES, Heads, Strengths, reference, ssd_mimo

FUNCTIONS = ("ssd_mimo",)

#: Writes and reads of a token.
R = 3


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k, v = draw(B, T, R, 1, K), draw(B, T, R, 1, K), draw(B, T, R, H, K)
    log_decay, now, kept = (draw(B, T, H).abs() for _ in range(3))
    biases = {"q_bias": draw(H, R, K), "k_bias": draw(H, R, K)}
    strengths = {"log_decay": -0.1 * log_decay, "now": now, "kept": kept}
    return {"q": q, "k": k, "v": v, **strengths, **biases, "angles": draw(B, T, H, K // 4)}


def _op(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    return ssd_mimo(q, k, v, Strengths(*rest[:3]), heads=Heads(*rest[3:]), backend=backend)


def _definition(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return reference.ssd_mimo(q, k, v, Strengths(*rest[:3]), Heads(*rest[3:]))


WIDE = ("log_decay", "now", "kept", "q_bias", "k_bias", "angles")
CASES = {"ssd mimo": by_backend(_op, _definition, _inputs, FAMILIES, WIDE)}

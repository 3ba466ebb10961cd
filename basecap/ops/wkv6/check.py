"""The cases of the recurrence of RWKV-5 and 6: what runs by chunks, and heads too wide for that."""

from functools import partial

from torch import Tensor

from basecap.ops.cases import B, Draw, H, K, by_backend
from basecap.ops.wkv6 import FAMILIES, reference, wkv6

FUNCTIONS = ("wkv6",)


def _inputs(draw: Draw, T: int, values: int = K) -> dict[str, Tensor]:
    r, k, v, decay = (draw(B, T, H, width) for width in (K, K, values, K))
    return {"r": r, "k": k, "v": v, "log_decay": -(decay - 2).exp(), "bonus": draw(H, K)}


CASES = {
    "wkv6": by_backend(wkv6, reference.wkv6, _inputs, FAMILIES),
    "wkv6, values in parts": by_backend(wkv6, reference.wkv6, partial(_inputs, values=96), FAMILIES),
    "wkv6 by tokens, heads of 97": by_backend(wkv6, reference.wkv6, partial(_inputs, values=97), FAMILIES),
}

"""The case of the delta rule."""

import torch.nn.functional as F
from torch import Tensor

from basecap.ops.cases import B, Draw, H, K, by_backend
from basecap.ops.delta_rule import FAMILIES, delta_rule, reference

FUNCTIONS = ("delta_rule",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": draw(B, T, H, K),
        "beta": draw(B, T, H).sigmoid(),
        "log_decay": -0.1 * draw(B, T, H).abs(),
    }


CASES = {"delta rule": by_backend(delta_rule, reference.delta_rule, _inputs, FAMILIES, ("beta", "log_decay"))}

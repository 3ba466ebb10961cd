"""Inputs of Top-1 selection for its checks."""

import torch.nn.functional as F
from torch import Tensor

from basecap.ops.cases import B, Draw, H, K


def with_exact_scores(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return q, k, v with queries and keys in multiples of 1/8: scores are exact, so all families choose alike."""
    q, k = ((F.rms_norm(x, x.shape[-1:]) * 8).round() / 8 for x in (q, k))
    return {"q": q, "k": k, "v": v}


def choices(draw: Draw, T: int) -> dict[str, Tensor]:
    """Return q [B, T, 2 H, K], k and v [B, T, H, K]."""
    return with_exact_scores(draw(B, T, 2 * H, K), draw(B, T, H, K), draw(B, T, H, K))

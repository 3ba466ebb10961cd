"""The definition of the short convolution, any dtype, token by token and tap by tap."""

import torch
from torch import Tensor


def short_convolution(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    *,
    activation: str = "none",
    segments: Tensor | None = None,
) -> Tensor:
    """Return [B, T, D]; see `basecap.ops.short_convolution.short_convolution`."""
    _, T, D = x_BTD.shape
    W = weight_DW.shape[1]
    outputs = []
    for t in range(T):
        y_BD = torch.zeros_like(x_BTD[:, t]) if bias_D is None else bias_D.expand(len(x_BTD), D)
        for j in range(min(W, t + 1)):
            tap_BD = weight_DW[:, W - 1 - j] * x_BTD[:, t - j]
            if segments is not None:
                tap_BD = tap_BD * (segments[:, t - j] == segments[:, t])[:, None]
            y_BD = y_BD + tap_BD
        outputs.append(y_BD / (1 + torch.exp(-y_BD)) if activation == "silu" else y_BD)
    return torch.stack(outputs, dim=1)

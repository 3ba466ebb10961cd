"""The decoder of tasks whose targets are all read at the last position, such as MAD's compression."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decoder(nn.Module):
    """MAD's decoder: activations for every position, from those at the last position alone.

    The activations at the last position plus a sinusoidal code of each position pass through two layers
    `gelu(linear(norm(x)))` of the model's width. The model's last norm and its head follow. As coded in athms/mad-lab
    at 0f49a45, mad/model/auto_encoder.py, except that norms and head are those of the model: there the head has a bias
    and is never tied to the embedding.
    """

    def __init__(self, hidden: int, make_norm: Callable[[int], nn.Module]):
        """Build the two layers, with norms by `make_norm(hidden)`."""
        super().__init__()
        self.hidden = hidden
        layers = [(make_norm(hidden), nn.Linear(hidden, hidden), nn.GELU()) for _ in range(2)]
        self.layers = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return activations [B, T, D] that depend on x[:, -1] only."""
        codes_TD = position_codes(x_BTD.shape[1], self.hidden, x_BTD.device)
        return self.layers(x_BTD[:, -1:] + codes_TD.to(x_BTD.dtype))

    def flops(self, length: int) -> float:
        """Floating-point operations of a forward pass over `length` positions (multiply-add = 2)."""
        return 2.0 * length * 2 * self.hidden**2


def position_codes(length: int, hidden: int, device: torch.device) -> Tensor:
    """Return the sines, then the cosines, of positions times rates from 1 down to 1e-4: float32 [T, D]."""
    half = hidden // 2
    rates = 10_000.0 ** -(torch.arange(half, device=device) / max(1, half - 1))
    angles = torch.arange(length, device=device)[:, None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, hidden % 2))

"""The definition of RWKV-4's weighted average (arXiv 2305.13048), any dtype, one token at a time."""

import torch
from torch import Tensor


def wkv4(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] and the final state [B, 2, D]; see `basecap.ops.wkv4.wkv4`."""
    B, T, D = v_BTD.shape
    mean = v_BTD.new_zeros(B, D) if state_B2D is None else state_B2D[:, 0]
    weight = v_BTD.new_full((B, D), float("-inf")) if state_B2D is None else state_B2D[:, 1]
    outputs = []
    for t in range(T):
        if segments is not None and t > 0:
            weight = weight.masked_fill((segments[:, t] != segments[:, t - 1])[:, None], float("-inf"))
        outputs.append(_average(mean, weight, v_BTD[:, t], k_BTD[:, t] + bonus_D)[0])
        mean, weight = _average(mean, weight - decay_D, v_BTD[:, t], k_BTD[:, t])
    return torch.stack(outputs, dim=1), torch.stack([mean, weight], dim=1)


def _average(old: Tensor, old_weight: Tensor, new: Tensor, new_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of two values weighted by exp(weight), and the logarithm of the summed weights."""
    largest = torch.maximum(old_weight, new_weight)
    a, b = (old_weight - largest).exp(), (new_weight - largest).exp()
    return (a * old + b * new) / (a + b), largest + (a + b).log()

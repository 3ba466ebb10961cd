"""RWKV-4's weighted averages as parallel scans over spans that double in length, in plain PyTorch.

A span of tokens is a mean and the logarithm of its weight. Two neighbours make one: the older weight decays by the
younger span's length, the weights add up (logaddexp) and the means are averaged by them (a sigmoid of the
difference). Nothing overflows for any keys, and there are log2(T) steps instead of T.
"""

import math

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._influence import visible

RUNS, BACKEND = EAGER, "eager"


def supports(v_BTD: Tensor) -> None:
    """Return None: this runs everywhere."""


def scan(k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return running weights and means [B, T, D]; see `operators.scan`."""
    weight, mean = k_BTD, v_BTD
    ids = None if starts_BT is None else starts_BT.cumsum(1)[..., None]
    span = 1
    while span < weight.shape[1]:
        reach = weight[:, :-span] - span * decay_D
        if ids is not None:
            reach = reach.masked_fill(ids[:, span:] != ids[:, :-span], -math.inf)
        young = weight[:, span:]
        mean = torch.cat([mean[:, :span], torch.lerp(mean[:, span:], mean[:, :-span], share(reach, young))], dim=1)
        weight = torch.cat([weight[:, :span], torch.logaddexp(young, reach)], dim=1)
        span *= 2
    return weight, mean


def share(older: Tensor, younger: Tensor) -> Tensor:
    """Return exp(older) / (exp(older) + exp(younger)); 1/2 where neither weighs anything."""
    return torch.sigmoid((older - younger).masked_fill(older == younger, 0.0))


def accumulate(share_BTD: Tensor, values_NBTD: Tensor) -> Tensor:
    """Return x_t = values_t + share_{t+1} x_{t+1}, [N, B, T, D]."""
    share, x = share_BTD[:, 1:], values_NBTD
    span = 1
    while span < x.shape[2]:
        # share[t] now carries what reaches t from t + span.
        x = torch.cat([torch.addcmul(x[:, :, :-span], share, x[:, :, span:]), x[:, :, -span:]], dim=2)
        share = share[:, :-span] * share[:, span:]
        span *= 2
    return x


def weights(k_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return [B, D, T, T], the weight of v_s in o_t per channel when there is no first state."""
    T = k_BTD.shape[1]
    t = torch.arange(T, device=k_BTD.device)
    age = t[:, None] - t[None, :]
    weight_DTT = torch.where(age == 0, bonus_D[:, None, None], -(age - 1) * decay_D[:, None, None])
    scores = k_BTD.transpose(1, 2)[:, :, None, :] + weight_DTT
    return scores.masked_fill(~visible(T, segments, k_BTD.device), -math.inf).softmax(-1)

"""RWKV-4's weighted average as a parallel scan over spans that double in length, in plain PyTorch.

A span of tokens is a mean and the logarithm of its weight. Two neighbours make one: the older weight decays by the
younger span's length, the weights add up (logaddexp) and the means are averaged by them (a sigmoid of the
difference). Nothing overflows, whatever the keys, and there are log2(T) steps instead of T.
"""

import math

import torch
from torch import Tensor

NONE = -math.inf


def wkv4(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] and the final state [B, 2, D]; computed in float32 or wider, O(T log T)."""
    wide = torch.promote_types(v_BTD.dtype, torch.float32)
    k, v, decay = k_BTD.to(wide), v_BTD.to(wide), decay_D.to(wide)
    B, T, D = v.shape
    # The state stands before the first token like a token of its own: after t steps the scan holds S_{t-1}.
    state = v.new_tensor([0.0, NONE])[:, None].expand(B, 2, D) if state_B2D is None else state_B2D.to(wide)
    mean, weight = torch.cat([state[:, :1], v], dim=1), torch.cat([state[:, 1:], k], dim=1)
    ids = None if segments is None else torch.cat([segments[:, :1], segments], dim=1)
    span = 1
    while span <= T:
        reach = weight[:, :-span] - span * decay
        if ids is not None:
            reach = reach.masked_fill((ids[:, span:] != ids[:, :-span])[..., None], NONE)
        older = torch.sigmoid(reach - weight[:, span:])
        mean = torch.cat([mean[:, :span], torch.lerp(mean[:, span:], mean[:, :-span], older)], dim=1)
        weight = torch.cat([weight[:, :span], torch.logaddexp(weight[:, span:], reach)], dim=1)
        span *= 2
    past = weight[:, :T]
    if ids is not None:
        past = past.masked_fill((ids[:, 1:] != ids[:, :-1])[..., None], NONE)
    o_BTD = torch.lerp(v, mean[:, :T], torch.sigmoid(past - k - bonus_D.to(wide)))
    return o_BTD.to(v_BTD.dtype), torch.stack([mean[:, T], weight[:, T]], dim=1)


def influence(k_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return [B, D, T, T], the weight of v_s in o_t per channel when there is no first state."""
    T = k_BTD.shape[1]
    t = torch.arange(T, device=k_BTD.device)
    age = t[:, None] - t[None, :]
    weight_DTT = torch.where(age == 0, bonus_D[:, None, None], -(age - 1) * decay_D[:, None, None])
    visible = age >= 0
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])[:, None]
    scores = k_BTD.transpose(1, 2)[:, :, None, :] + weight_DTT
    return scores.masked_fill(~visible, NONE).softmax(-1)

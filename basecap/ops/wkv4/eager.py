"""RWKV-4's weighted averages as parallel scans over spans that double in length, in plain PyTorch.

A span of tokens is a mean and the logarithm of its weight. Two neighbours make one: the older weight decays by the
younger span's length, the weights add up (logaddexp) and the means are averaged by them (a sigmoid of the
difference). Nothing overflows for any keys, and there are log2(T) steps instead of T.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._influence import visible
from basecap.ops._recurrence.blocks import starts

RUNS, BACKEND = EAGER, "eager"


def supports(v_BTD: Tensor) -> None:
    """Return None: this runs everywhere."""


def forward(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final state, and the weights and means that the tokens find; see `operators.average`."""
    # Not by torch.promote_types: no record holds a call that returns a dtype.
    wide = torch.float64 if v_BTD.dtype == torch.float64 else torch.float32
    k, v = k_BTD.to(wide), v_BTD.to(wide)
    T = v.shape[1]
    # The state is put before the first token as if it were a token: after t steps the scan holds S_{t-1}.
    if state_B2D is None:
        keys, values = _behind(k, -math.inf), _behind(v, 0.0)
    else:
        state = state_B2D.to(wide)
        keys, values = torch.cat([state[:, 1:], k], dim=1), torch.cat([state[:, :1], v], dim=1)
    new = starts(segments)
    weight, mean = _scan(keys, values, decay_D.to(wide), None if new is None else F.pad(new, (1, 0)))
    final = torch.stack([mean[:, T], weight[:, T]], dim=1)
    if new is not None:
        weight = weight.masked_fill(F.pad(new, (0, 1))[..., None], -math.inf)
    o_BTD = torch.lerp(v, mean[:, :T], torch.sigmoid(weight[:, :T] - k - bonus_D.to(wide)))
    return o_BTD.to(v_BTD.dtype), final, torch.stack([weight, mean])


def backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    found_2BSD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, decay, bonus and the first state; see `operators.average_backward`."""
    wide = found_2BSD.dtype
    k, v, decay, bonus = (x.to(wide) for x in (k_BTD, v_BTD, decay_D, bonus_D))
    grad = torch.zeros_like(v) if grad_o is None else grad_o.to(wide)
    weights, means = found_2BSD[:, :, :-1]
    share = torch.sigmoid(weights - k - bonus)
    grad_past = torch.ops.aten.sigmoid_backward(grad * (means - v), share)
    last = torch.zeros_like(found_2BSD[:, :, -1:]) if grad_final is None else grad_final.split(1, dim=1)
    grad_m, grad_W = (torch.cat(pair, dim=1) for pair in zip((grad * share, grad_past), last, strict=True))
    added = torch.stack([grad_m, grad_m * found_2BSD[1] - grad_W])
    # The scan again: its tokens, the state before them, and what each of them finds.
    keys, values = (torch.cat([x[:, :1], y], dim=1) for x, y in ((weights, k), (means, v)))
    older = _behind(weights - decay, -math.inf)
    gap = (older - keys).masked_fill(older == -math.inf, -math.inf)  # also where neither has weight
    past = torch.sigmoid(gap)
    own = torch.sigmoid(-gap).masked_fill(keys == -math.inf, 0.0)
    G, Q = _accumulate(past, added)
    grad_decay = (past * (Q - _behind(means, 0.0) * G)).sum((0, 1))
    grad_keys, grad_values = own * (values * G - Q), own * G
    grad_v = grad * (1 - share) + grad_values[:, 1:]
    grads = -grad_past + grad_keys[:, 1:], grad_v, grad_decay, (-grad_past).sum((0, 1))
    grad_state = torch.stack([grad_values[:, 0], grad_keys[:, 0]], dim=1)
    given = (k_BTD, v_BTD, decay_D, bonus_D)
    return *(grad.to(x.dtype) for grad, x in zip(grads, given, strict=True)), grad_state


def _behind(x_BTD: Tensor, first: float) -> Tensor:
    """Return [B, T + 1, D], x behind a token of this number."""
    return F.pad(x_BTD, (0, 0, 1, 0), value=first)


def _scan(k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return running weights and means [B, T, D]; the average starts again where `starts_BT` says."""
    weight, mean = k_BTD, v_BTD
    ids = None if starts_BT is None else starts_BT.cumsum(1)[..., None]
    span = 1
    while span < weight.shape[1]:
        reach = weight[:, :-span] - span * decay_D
        if ids is not None:
            reach = reach.masked_fill(ids[:, span:] != ids[:, :-span], -math.inf)
        young = weight[:, span:]
        mean = torch.cat([mean[:, :span], torch.lerp(mean[:, span:], mean[:, :-span], _share(reach, young))], dim=1)
        weight = torch.cat([weight[:, :span], torch.logaddexp(young, reach)], dim=1)
        span *= 2
    return weight, mean


def _share(older: Tensor, younger: Tensor) -> Tensor:
    """Return exp(older) / (exp(older) + exp(younger)); 1/2 where neither weighs anything."""
    return torch.sigmoid((older - younger).masked_fill(older == younger, 0.0))


def _accumulate(share_BTD: Tensor, values_NBTD: Tensor) -> Tensor:
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

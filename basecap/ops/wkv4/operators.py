"""The scan of weighted averages as a PyTorch custom operator: one node of a compiled graph, O(T) memory for backward.

The state after token t is a mean m_t and the logarithm of its weight W_t. With the share of the past in it,
p_t = sigmoid(W_{t-1} - decay - k_t),

    W_t = logaddexp(W_{t-1} - decay, k_t),    m_t = p_t m_{t-1} + (1 - p_t) v_t.

Let gm_t and gW_t be the gradients that reach m_t and W_t from outside. With the gradients that come from later tokens,

    G_t = gm_t + p_{t+1} G_{t+1},    Q_t = (gm_t m_t - gW_t) + p_{t+1} Q_{t+1},

gives dv_t = (1 - p_t) G_t, dk_t = (1 - p_t) (v_t G_t - Q_t) and ddecay = -sum_t p_t (m_{t-1} G_t - Q_t).
"""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of
from basecap.ops._recurrence.blocks import starts
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator
from basecap.ops.wkv4 import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


@operator("basecap::wkv4_scan")
def scan(k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, starts_BT: Tensor | None, family: str) -> tuple[Tensor, Tensor]:
    """Return W and m [B, T, D].

    Args:
        k_BTD: logarithms of weights, -inf for none; float32 or float64.
        v_BTD: values.
        decay_D: what a logarithm of a weight loses per token.
        starts_BT: bool, where the average starts again; the first token need not be marked.
        family: one of FAMILIES.
    """
    weight, mean = functions_of(FAMILIES[family]).scan(k_BTD, v_BTD, decay_D, starts_BT)
    # An operator must not return its inputs, as the scan of one token does.
    return (weight.clone(), mean.clone()) if weight is k_BTD else (weight, mean)


@scan.register_fake
def _(k_BTD, v_BTD, decay_D, starts_BT, family):
    return k_BTD.new_empty(k_BTD.shape), v_BTD.new_empty(v_BTD.shape)


@operator("basecap::wkv4_accumulate")
def accumulate(share_BTD: Tensor, values_NBTD: Tensor, family: str) -> Tensor:
    """Return x_t = values_t + share_{t+1} x_{t+1}, [N, B, T, D], for N = 2 values."""
    x: Tensor = functions_of(FAMILIES[family]).accumulate(share_BTD, values_NBTD)
    return x.clone() if x is values_NBTD else x


@accumulate.register_fake
def _(share_BTD, values_NBTD, family):
    return values_NBTD.new_empty(values_NBTD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.family = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_W: Tensor, grad_m: Tensor) -> tuple[Tensor | None, ...]:
    k, v, decay, begins, W, m = ctx.saved_tensors
    # Nothing comes before the first token.
    old = torch.cat([torch.full_like(W[:, :1], -torch.inf), W[:, :-1] - decay], dim=1)
    if begins is not None:
        old = old.masked_fill(begins[..., None], -torch.inf)
    past = eager.share(old, k).masked_fill(old == -torch.inf, 0.0)
    own = eager.share(k, old).masked_fill(k == -torch.inf, 0.0)
    G, Q = accumulate(past, torch.stack([grad_m, grad_m * m - grad_W]), ctx.family)
    old_m = torch.cat([torch.zeros_like(m[:, :1]), m[:, :-1]], dim=1)
    grad_decay = -(past * (old_m * G - Q)).sum((0, 1))
    return own * (v * G - Q), own * G, grad_decay, None, None


scan.register_autograd(_gradients, setup_context=_save)
accumulate.register_autograd(no_second_derivatives("wkv4"))


def wkv4(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None = None,
    segments: Tensor | None = None,
    family: str = "eager",
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] and the final state [B, 2, D]; computed in float32 or wider."""
    wide = torch.promote_types(v_BTD.dtype, torch.float32)
    k, v = k_BTD.to(wide), v_BTD.to(wide)
    B, T, D = v.shape
    if state_B2D is None:
        state = torch.stack([v.new_zeros(B, D), v.new_full((B, D), -torch.inf)], dim=1)
    else:
        state = state_B2D.to(wide)
    # The state is put before the first token as if it were a token: after t steps the scan holds S_{t-1}.
    new = starts(segments)
    weight, mean = scan(
        torch.cat([state[:, 1:], k], dim=1),
        torch.cat([state[:, :1], v], dim=1),
        decay_D.to(wide),
        None if new is None else torch.cat([torch.zeros_like(new[:, :1]), new], dim=1),
        family,
    )
    past = weight[:, :T]
    if new is not None:
        past = past.masked_fill(new[..., None], -torch.inf)
    o_BTD = torch.lerp(v, mean[:, :T], torch.sigmoid(past - k - bonus_D.to(wide)))
    return o_BTD.to(v_BTD.dtype), torch.stack([mean[:, T], weight[:, T]], dim=1)

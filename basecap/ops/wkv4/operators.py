"""The weighted averages as PyTorch custom operators: one node of a compiled graph, O(T) memory for backward.

The state after token t is a mean m_t and the logarithm of its weight W_t. With the share of the past in it,
p_t = sigmoid(W_{t-1} - decay - k_t), and in the output, q_t = sigmoid(W_{t-1} - k_t - bonus),

    W_t = logaddexp(W_{t-1} - decay, k_t),    m_t = p_t m_{t-1} + (1 - p_t) v_t,    o_t = q_t m_{t-1} + (1 - q_t) v_t.

With do_t, the gradient of o_t, the next output sends gm_t = do_{t+1} q_{t+1} to m_t and gW_t = e_{t+1} to W_t, where
e_t = do_t (m_{t-1} - v_t) q_t (1 - q_t); the last state gets its own. With what comes from later tokens,

    G_t = gm_t + p_{t+1} G_{t+1},    Q_t = (gm_t m_t - gW_t) + p_{t+1} Q_{t+1},

gives dv_t = (1 - p_t) G_t + (1 - q_t) do_t, dk_t = (1 - p_t) (v_t G_t - Q_t) - e_t, dbonus = -sum_t e_t and
ddecay = -sum_t p_t (m_{t-1} G_t - Q_t). What each token finds, W_{t-1} and m_{t-1}, is kept; where a segment begins,
W = -inf.
"""

from typing import Any

import torch
from torch import Tensor

from basecap.ops._dispatch import families, functions_of
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import operator
from basecap.ops.wkv4 import eager, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def _wide(v_BTD: Tensor) -> torch.dtype:
    return torch.float64 if v_BTD.dtype == torch.float64 else torch.float32


@operator("basecap::wkv4")
def average(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None,
    segments: Tensor | None,
    family: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D], the final state [B, 2, D] and, for backward, [2, B, T + 1, D].

    The last are the weights and means that the tokens find, and those behind the last token. All but the outputs are
    float32, or float64 for float64; `family` is one of FAMILIES.
    """
    return functions_of(FAMILIES[family]).forward(k_BTD, v_BTD, decay_D, bonus_D, state_B2D, segments)


@average.register_fake
def _(k_BTD, v_BTD, decay_D, bonus_D, state_B2D, segments, family):
    (B, T, D), wide = v_BTD.shape, _wide(v_BTD)
    found = v_BTD.new_empty(2, B, T + 1, D, dtype=wide)
    return v_BTD.new_empty(B, T, D), v_BTD.new_empty(B, 2, D, dtype=wide), found


@operator("basecap::wkv4_backward")
def average_backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    found_2BSD: Tensor,
    family: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, decay, bonus and the first state; those of results are zero when None.

    The last tensor is the last that `average` returned, with S = T + 1.
    """
    return functions_of(FAMILIES[family]).backward(grad_o, grad_final, k_BTD, v_BTD, decay_D, bonus_D, found_2BSD)


@average_backward.register_fake
def _(grad_o, grad_final, k_BTD, v_BTD, decay_D, bonus_D, found_2BSD, family):
    grads = (x.new_empty(x.shape) for x in (k_BTD, v_BTD, decay_D, bonus_D))
    return *grads, found_2BSD.new_empty(len(v_BTD), 2, len(bonus_D))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, _, ctx.family = inputs
    ctx.continues = state is not None
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *grads, grad_bonus, grad_state = average_backward(grad_o, grad_final, *ctx.saved_tensors, ctx.family)
    # The final state does not depend on the bonus.
    return *grads, None if grad_o is None else grad_bonus, grad_state if ctx.continues else None, None, None


average.register_autograd(_gradients, setup_context=_save)
average_backward.register_autograd(no_second_derivatives("wkv4"))


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
    o, final, *_ = average(k_BTD, v_BTD, decay_D, bonus_D, state_B2D, segments, family)
    return o, final

"""The scan of weighted averages as a PyTorch custom operator: one node of a compiled graph, O(T) memory for backward.

The state after token t is a mean m_t and the logarithm of its weight W_t. With the share of the past in it,
p_t = sigmoid(W_{t-1} - decay - k_t),

    W_t = logaddexp(W_{t-1} - decay, k_t),    m_t = p_t m_{t-1} + (1 - p_t) v_t.

Let gm_t and gW_t be the gradients that reach m_t and W_t from outside. With the gradients that come from later tokens,

    G_t = gm_t + p_{t+1} G_{t+1},    Q_t = (gm_t m_t - gW_t) + p_{t+1} Q_{t+1},

gives dv_t = (1 - p_t) G_t, dk_t = (1 - p_t) (v_t G_t - Q_t) and ddecay = -sum_t p_t (m_{t-1} G_t - Q_t).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import families, functions_of
from basecap.ops._recurrence.blocks import starts
from basecap.ops._transforms import no_second_derivatives
from basecap.ops.operators import Direct, operator
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
    inputs = torch.stack([grad_m, grad_m * m - grad_W])
    grads = _scan_gradients(lambda *of: accumulate(*of, ctx.family), inputs, k, v, decay, begins, W, m)
    return *grads, None, None


scan.register_autograd(_gradients, setup_context=_save)
accumulate.register_autograd(no_second_derivatives("wkv4"))


def _scan_gradients(
    run: Callable[[Tensor, Tensor], Tensor],
    inputs_2BTD: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    begins: Tensor | None,
    W: Tensor,
    m: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of k, v and decay; `run` accumulates `inputs_2BTD` to G and Q."""
    # Nothing comes before the first token.
    old = _behind(W[:, :-1] - decay, -torch.inf)
    if begins is not None:
        old = old.masked_fill(begins[..., None], -torch.inf)
    gap = (old - k).masked_fill(old == -torch.inf, -torch.inf)  # also where neither has weight
    past = torch.sigmoid(gap)
    own = torch.sigmoid(-gap).masked_fill(k == -torch.inf, 0.0)
    G, Q = run(past, inputs_2BTD)
    grad_decay = (past * (Q - _behind(m[:, :-1], 0.0) * G)).sum((0, 1))
    return own * (v * G - Q), own * G, grad_decay


def _behind(x_BTD: Tensor, first: float) -> Tensor:
    """Return [B, T + 1, D], x behind a token of this number."""
    return F.pad(x_BTD, (0, 0, 1, 0), value=first)


def _after_state(new_BT: Tensor | None) -> Tensor | None:
    """Return where the scan starts again, [B, T + 1]: the state stands before the first token as if it were one."""
    return None if new_BT is None else torch.cat([torch.zeros_like(new_BT[:, :1]), new_BT], dim=1)


def _averages(
    run: Callable[..., tuple[Tensor, Tensor]],
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    state_B2D: Tensor | None,
    segments: Tensor | None,
    family: str,
) -> tuple[Tensor, ...]:
    """Return outputs and final state, and for the backward pass what the scan took and returned, and p_t; see `wkv4`.

    `run` is `scan`.
    """
    # Not by torch.promote_types: no record holds a call that returns a dtype.
    wide = torch.float64 if v_BTD.dtype == torch.float64 else torch.float32
    k, v = k_BTD.to(wide), v_BTD.to(wide)
    T = v.shape[1]
    # The state is put before the first token as if it were a token: after t steps the scan holds S_{t-1}.
    if state_B2D is None:
        keys, values = _behind(k, -torch.inf), _behind(v, 0.0)
    else:
        state = state_B2D.to(wide)
        keys, values = torch.cat([state[:, 1:], k], dim=1), torch.cat([state[:, :1], v], dim=1)
    new = starts(segments)
    weight, mean = run(keys, values, decay_D.to(wide), _after_state(new), family)
    past = weight[:, :T]
    if new is not None:
        past = past.masked_fill(new[..., None], -torch.inf)
    share = torch.sigmoid(past - k - bonus_D.to(wide))
    o_BTD = torch.lerp(v, mean[:, :T], share)
    final = torch.stack([mean[:, T], weight[:, T]], dim=1)
    return o_BTD.to(v_BTD.dtype), final, keys, values, weight, mean, share


def _gradients_of_averages(
    run: Callable[..., Tensor],
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    inputs: Sequence[Tensor],
    segments: Tensor | None,
    kept: Sequence[Tensor],
    family: str,
) -> tuple[Tensor, ...]:
    """Return the gradients of k, v, decay, bonus and the first state, in the dtype computed with.

    Args:
        run: `accumulate`.
        grad_o: gradient of the outputs, None for zero.
        grad_final: gradient of the final state, likewise.
        inputs: k, v, decay, bonus and the first state; the gradients depend on them all.
        segments: as `wkv4` takes them.
        kept: what `_averages` returns behind outputs and final state.
        family: one of FAMILIES.
    """
    keys, values, weight, mean, share = kept
    grad = torch.zeros_like(share) if grad_o is None else grad_o.to(share.dtype)
    grad_past = torch.ops.aten.sigmoid_backward(grad * (mean[:, :-1] - values[:, 1:]), share)
    grad_k = -grad_past
    grad_bonus = grad_k.sum((0, 1))
    new = starts(segments)
    if new is not None:
        grad_past = grad_past.masked_fill(new[..., None], 0.0)
    grad_m, grad_W, means = grad * share, grad_past, mean[:, :-1]
    if grad_final is not None:
        both = zip((grad_m, grad_W), grad_final.split(1, dim=1), strict=True)
        (grad_m, grad_W), means = (torch.cat(pair, dim=1) for pair in both), mean
    added, decay = torch.stack([grad_m, grad_m * means - grad_W]), inputs[2].to(share.dtype)
    added = F.pad(added, (0, 0, 0, 1)) if grad_final is None else added
    grad_keys, grad_values, grad_decay = _scan_gradients(
        lambda *of: run(*of, family), added, keys, values, decay, _after_state(new), weight, mean
    )
    grad_state = None if inputs[4] is None else torch.stack([grad_values[:, 0], grad_keys[:, 0]], dim=1)
    grad_v = grad * (1 - share) + grad_values[:, 1:]
    return grad_k + grad_keys[:, 1:], grad_v, grad_decay, grad_bonus, grad_state


_by_functions, _by_operators = (partial(_gradients_of_averages, run) for run in (accumulate.function, accumulate))
_backward = Direct("wkv4_backward", _by_functions, seen=_by_operators)
_backward.register_autograd(no_second_derivatives("wkv4"))


def _save_averages(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.family = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _gradients_at_once(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple[Any, ...]:
    k, v, decay, bonus, state, segments, *kept = ctx.saved_tensors
    inputs = [k, v, decay, bonus, state]
    *grads, grad_bonus, grad_state = _backward(grad_o, grad_final, inputs, segments, kept, ctx.family)
    grad_bonus = None if grad_o is None else grad_bonus  # which the final state does not depend on
    return *grads, grad_bonus, grad_state, None, None


_at_once = Direct("wkv4", partial(_averages, scan.function), seen=partial(_averages, scan))
_at_once.register_autograd(_gradients_at_once, setup_context=_save_averages)


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
    o, final, *_ = _at_once(k_BTD, v_BTD, decay_D, bonus_D, state_B2D, segments, family)
    return o, final

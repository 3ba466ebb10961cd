"""The Triton kernels of the recurrences as a PyTorch custom operator with its gradient: one node when compiled."""

from typing import Any

from torch import Tensor

from basecap.ops._dispatch import launch_of
from basecap.ops._transforms import no_second_derivatives, refuse_batched_gradients
from basecap.ops.operators import operator

#: Tokens between two states that are kept for backward, which holds those of every token of one such chunk. It makes
#: them again, on a GPU with sums over the keys in another order: the last bits of the gradients of `wkv7` depend on it.
CHUNK = 64


@operator("basecap::wkv_recur")
def recur(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, H, V], the final state [B, H, K, V] and states kept for backward, all float32.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T. With a and b it also gains b_t (a_t^T S_{t-1}) and
    o_t = r_t^T S_t; without them o_t = r_t^T S_{t-1}.

    Args:
        r: [B, T, H, K], like log_decay, k, a and b.
        log_decay: at most 0.
        k: the keys that v is written with.
        v: [B, T, H, V].
        a: the key that the state is read with, or None.
        b: the key that this reading is written with, or None.
        state: float32 [B, H, K, V].
        starts: bool [B, T], where the state is emptied before the token.
    """
    return launch_of(__package__).recur((r, log_decay, k, v, a, b), state, starts, CHUNK)


@recur.register_fake
def _(r, log_decay, k, v, a, b, state, starts):
    B, T, H, K = r.shape
    kept = state.new_empty(B * H, -(-T // CHUNK), K, v.shape[3])
    return state.new_empty(v.shape), state.new_empty(state.shape), kept


@operator("basecap::wkv_recur_backward")
def recur_backward(grads: list[Tensor], inputs: list[Tensor], starts: Tensor | None, kept: Tensor) -> list[Tensor]:
    """Return the gradients of r, log_decay, k, v, (a, b) and the state; `inputs` are those without the state."""
    a, b = inputs[4:] or (None, None)
    out = launch_of(__package__).recur_backward((grads[0], grads[1]), (*inputs[:4], a, b), kept, starts, CHUNK)
    return list(out) if len(inputs) == 6 else [*out[:4], out[6]]


@recur_backward.register_fake
def _(grads, inputs, starts, kept):
    return [*(x.new_empty(x.shape) for x in inputs), grads[1].new_empty(grads[1].shape)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, starts = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # zeros for the states kept would be as large as these
    ctx.save_for_backward(output[2], starts, *tensors)


def _gradients(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    refuse_batched_gradients("the recurrence of RWKV", grad_o, grad_final)
    kept, starts, *tensors = ctx.saved_tensors
    (B, _, H, K), V = tensors[0].shape, tensors[3].shape[3]
    grad_o = kept.new_zeros(tensors[3].shape) if grad_o is None else grad_o
    grad_final = kept.new_zeros(B, H, K, V) if grad_final is None else grad_final
    present = [x for x in tensors if x is not None]
    *grads, grad_state = recur_backward([grad_o, grad_final], present, starts, kept)
    return *[*grads, None, None][:6], grad_state, None


recur.register_autograd(_gradients, setup_context=_save)
recur_backward.register_autograd(no_second_derivatives("the recurrence of RWKV"))

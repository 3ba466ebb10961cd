"""The delta rule by channel token by token in Triton, by the kernels of `wkv7`, which has it as a case."""

from torch import Tensor

from basecap.ops.wkv7 import triton_tokens

RUNS, BACKEND = triton_tokens.RUNS, triton_tokens.BACKEND
supports = triton_tokens.supports


def channel_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erased_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; computed in float32."""
    r, log_decay, k, a, b = as_wkv7(q_BTHK, k_BTHK, erased_BTHK, log_decay_BTHK)
    return triton_tokens.wkv7(r, log_decay, k, v_BTHV, a, b, state_BHKV, segments)


def as_wkv7(q: Tensor, k: Tensor, erased: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return r, log decay, k, a, b with which `wkv7` is `channel_delta_rule`.

    (I - k erased^T) diag(exp(g)) = diag(exp(g)) + b a^T for a = -exp(g) erased and b = k.
    """
    return q, log_decay, k, -(log_decay.exp() * erased).to(k.dtype), k

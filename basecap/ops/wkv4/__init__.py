"""RWKV-4's exponentially decaying weighted average of values (arXiv 2305.13048)."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, refuse_transforms, use_triton
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops.wkv4 import operators


def wkv4(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    *,
    state_B2D: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Average values: o_t = sum_{s<=t} w_ts v_s / sum_{s<=t} w_ts for every channel by itself.

    w_ts = exp(k_s - (t - 1 - s) decay) for s < t and w_tt = exp(k_t + bonus).

    Its derivatives are those of torch.autograd, of first order: torch.func's (grad, vjp, jvp), forward mode and second
    derivatives are refused. `torch.func.vmap` runs it once for each part.

    Args:
        k_BTD: keys, logarithms of weights of any size.
        v_BTD: values.
        decay_D: what a logarithm of a weight loses per token, at least 0.
        bonus_D: what the present token's gains.
        state_B2D: (mean, logarithm of its weight) before the first token; weight -inf for none, as when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto", or insist on "eager" (plain PyTorch) or "triton".

    Returns:
        o [B, T, D] in the dtype of v and the final state [B, 2, D] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit together, or an impossible backend.
    """
    given = {"k": k_BTD, "v": v_BTD, "decay": decay_D, "bonus": bonus_D}
    check_floating(given)
    if k_BTD.dim() != 3 or k_BTD.shape != v_BTD.shape:
        raise ConfigError(f"k {tuple(k_BTD.shape)} and v {tuple(v_BTD.shape)} must both be [B, T, D].")
    for name, x in (("decay", decay_D), ("bonus", bonus_D)):
        if x.shape != v_BTD.shape[2:]:
            raise ConfigError(f"{name} {tuple(x.shape)} must be [D] = {tuple(v_BTD.shape[2:])}.")
    if v_BTD.shape[1] < 1:
        raise ConfigError("wkv4 needs at least one token.")
    B, T, D = v_BTD.shape
    check_state(state_B2D, (B, 2, D))
    check_segments(segments, (B, T))
    check_devices({**given, "state": state_B2D, "segments": segments})
    refuse_transforms("wkv4", *given.values(), state_B2D)
    # Every channel is a head of its own.
    triton = use_triton("wkv4", backend, v_BTD[..., None])
    with torch.autocast(v_BTD.device.type, enabled=False):
        return operators.wkv4(k_BTD, v_BTD, decay_D, bonus_D, state_B2D, segments, triton)

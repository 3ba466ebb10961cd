"""The recurrence of RWKV-5 (constant decay per channel) and RWKV-6 (data-dependent decay), arXiv 2404.05892."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.wkv6 import eager


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run o_t = r_t^T (S_{t-1} + diag(bonus) k_t v_t^T), S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T.

    Args:
        r_BTHK: receptances, what is read with.
        k_BTHK: keys.
        v_BTHV: values.
        log_decay_BTHK: logarithm of the decays, at most 0; B and T may be 1 (RWKV-5: [1, 1, H, K]).
        bonus_HK: weight of the present token, which has not been written yet when it is read.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _validate(r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK)
    with torch.autocast(v_BTHV.device.type, enabled=False):
        return eager.wkv6(r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state_BHKV, segments)


def _validate(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor) -> None:
    if r.dim() != 4 or r.shape != k.shape:
        raise ConfigError(f"r {tuple(r.shape)} and k {tuple(k.shape)} must both be [B, T, H, K].")
    if v.dim() != 4 or v.shape[:3] != r.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with {tuple(r.shape[:3])} in front.")
    fits = log_decay.dim() == 4 and all(n in (1, m) for n, m in zip(log_decay.shape[:2], r.shape[:2], strict=True))
    if not fits or log_decay.shape[2:] != r.shape[2:]:
        raise ConfigError(f"log_decay {tuple(log_decay.shape)} must be [B or 1, T or 1, H, K] for r {tuple(r.shape)}.")
    if bonus.shape != r.shape[2:]:
        raise ConfigError(f"bonus {tuple(bonus.shape)} must be [H, K] = {tuple(r.shape[2:])}.")
    if r.shape[1] < 1:
        raise ConfigError("wkv6 needs at least one token.")

"""State-space duality: linear attention with one decay per head and token (Mamba-2, arXiv 2405.21060)."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import (
    Backend,
    Decision,
    check_backend,
    decide,
    families,
    once,
    taken,
    without_autocast,
)
from basecap.ops._influence import Influence, of_heads, visible, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state, finite_log_decay
from basecap.ops.ssd import eager, reference, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)
#: Stands for a family where one token follows a state: plain PyTorch, of which nothing is noted.
STEP = "step"


def ssd(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    final: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t (arXiv 2405.21060, eq. 16; q = C, k = B).

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTGK: queries, one per group of H / G heads.
        k_BTGK: keys, likewise.
        v_BTHV: values.
        log_decay_BTH: logarithm of the decays, at most 0; zeros give plain linear attention.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        final: whether to return the final state.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64); without
        `final`, a tensor [0].

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    given = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, state_BHKV, segments, backend)
    decision = once(("ssd",), given, lambda: _decided(*given))
    check_segments(segments, v_BTHV.shape[:2])  # their numbers: nothing else differs from what was decided
    name = taken(decision)
    # Under autocast the states would be rounded to half precision between chunks.
    with without_autocast(v_BTHV.device):
        q, k = q_BTGK.to(v_BTHV.dtype), k_BTGK.to(v_BTHV.dtype)
        if name == STEP and state_BHKV is not None:
            o, state = eager.step(q, k, v_BTHV, log_decay_BTH, state_BHKV)
        else:
            o, state = FAMILIES[name].ssd(q, k, v_BTHV, log_decay_BTH, state_BHKV, segments, final=final)
    return o, state if final else state.new_empty(0)


def _decided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
    backend: Backend,
) -> Decision:
    """Return what runs; ConfigError for invalid arguments."""
    _validate(q, k, v, log_decay)
    (B, T, H, V), K = v.shape, q.shape[3]
    check_state(state, (B, H, K, V))
    check_segments(segments, (B, T))
    check_devices({"q": q, "k": k, "v": v, "log_decay": log_decay, "state": state, "segments": segments})
    if T == 1 and state is not None and backend != "triton":
        check_backend(backend)
        return Decision("ssd", STEP, None, FAMILIES)
    return decide("ssd", backend, FAMILIES, v, q, slower=triton_kernels.slower(v))


def influence(q_BTGK: Tensor, k_BTGK: Tensor, log_decay_BTH: Tensor, *, segments: Tensor | None = None) -> Influence:
    """Return q_t . k_s prod_{s<r<=t} decay_r, the factor in front of v_s in o_t of every head.

    The arguments are those of `ssd`, except the values; raises ConfigError as it does.
    """
    _validate(q_BTGK, k_BTGK, log_decay_BTH[..., None], log_decay_BTH)
    (q, k, log_decay), (B, T, H) = wide(q_BTGK, k_BTGK, finite_log_decay(log_decay_BTH)), log_decay_BTH.shape
    check_segments(segments, (B, T))
    check_devices({"q": q, "k": k, "log_decay": log_decay, "segments": segments})
    seen = visible(T, segments, q.device)

    def factors(heads: slice) -> Tensor:
        own_q, own_k = (of_heads(x, heads, H) for x in (q, k))
        return reference.factors(own_q, own_k, log_decay[:, :, heads]).where(seen, 0)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def _validate(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    check_floating({"q": q, "k": k, "v": v, "log_decay": log_decay})
    if q.dim() != 4 or q.shape != k.shape or q.shape[2] < 1:
        raise ConfigError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, G, K] with G at least 1.")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] < 1 or v.shape[2] % q.shape[2]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with H a positive multiple of {q.shape[2]} groups.")
    if log_decay.shape != v.shape[:3]:
        raise ConfigError(f"log_decay {tuple(log_decay.shape)} must be [B, T, H] = {tuple(v.shape[:3])}.")
    if v.shape[1] < 1:
        raise ConfigError("ssd needs at least one token.")

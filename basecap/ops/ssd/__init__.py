"""State-space duality: linear attention with one decay per head and token (Mamba-2, arXiv 2405.21060)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, check_backend, choose, families, without_autocast
from basecap.ops._influence import Influence, of_heads, visible, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state, finite_log_decay
from basecap.ops.ssd import eager, reference, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


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
    _validate(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH)
    (B, T, H, V), K = v_BTHV.shape, q_BTGK.shape[3]
    check_state(state_BHKV, (B, H, K, V))
    check_segments(segments, (B, T))
    given = {"q": q_BTGK, "k": k_BTGK, "v": v_BTHV, "log_decay": log_decay_BTH}
    check_devices({**given, "state": state_BHKV, "segments": segments})
    log_decay_BTH = finite_log_decay(log_decay_BTH)
    # Under autocast the states would be rounded to half precision between chunks.
    with without_autocast(v_BTHV.device):
        q, k = q_BTGK.to(v_BTHV.dtype), k_BTGK.to(v_BTHV.dtype)
        if T == 1 and state_BHKV is not None and backend != "triton":
            check_backend(backend)
            o, state = eager.step(q, k, v_BTHV, log_decay_BTH, state_BHKV)
        else:
            run = FAMILIES[choose("ssd", backend, FAMILIES, v_BTHV, q_BTGK, slower=triton_kernels.slower(v_BTHV))]
            o, state = run.ssd(q, k, v_BTHV, log_decay_BTH, state_BHKV, segments, final=final)
    return o, state if final else state.new_empty(0)


def ssd_mimo(
    q_BTRHK: Tensor,
    k_BTRHK: Tensor,
    v_BTRHV: Tensor,
    log_decay_BTH: Tensor,
    strengths: tuple[Tensor, Tensor],
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = a_t S_{t-1} + kept_t sum_r k_tr v_tr^T, o_tr = (a_t S_{t-1} + now_t sum_s k_ts v_ts^T)^T q_tr.

    The state space of several inputs and outputs (Mamba-3, arXiv 2603.15569): a token writes and reads R times, and
    reads itself with a strength of its own. It runs as `ssd` over R positions for each token, whose derivatives and
    kernels it has; README.md says how.

    Args:
        q_BTRHK: queries.
        k_BTRHK: keys.
        v_BTRHV: values.
        log_decay_BTH: log a_t, at most 0.
        strengths: now and kept [B, T, H]: with what strength a token reads itself, and later tokens read it.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: as for `ssd`.

    Returns:
        o [B, T, R, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match.
    """
    now_BTH, kept_BTH = strengths
    per_head = {"log_decay": log_decay_BTH, "now": now_BTH, "kept": kept_BTH}
    _validate_mimo(q_BTRHK, k_BTRHK, v_BTRHV, per_head)
    check_segments(segments, log_decay_BTH.shape[:2])
    given = {"q": q_BTRHK, "k": k_BTRHK, "v": v_BTRHV, **per_head}
    check_devices({**given, "state": state_BHKV, "segments": segments})
    R = v_BTRHV.shape[2]
    # Every token is written at the next one: what then lies in the state is what a token reads of those before it.
    k_before, v_before = _delayed(k_BTRHK, segments), _delayed(v_BTRHV, segments)
    before = _times(v_before, log_decay_BTH.exp() * _delayed(kept_BTH, segments))
    o, state = ssd(
        q_BTRHK.flatten(1, 2),
        k_before.flatten(1, 2),
        before.flatten(1, 2),
        F.pad(log_decay_BTH[:, :, None], (0, 0, 0, R - 1)).flatten(1, 2),
        state_BHKV=state_BHKV,
        segments=None if segments is None else segments.repeat_interleave(R, dim=1),
        backend=backend,
    )
    o = o.unflatten(1, (-1, R)) + _within(q_BTRHK, k_BTRHK, v_BTRHV, now_BTH, k_before, before)
    last_k, last_v = k_BTRHK[:, -1].to(state.dtype), _times(v_BTRHV, kept_BTH)[:, -1].to(state.dtype)
    return o, state + (last_k[..., None] * last_v[..., None, :]).sum(1)


def _within(q: Tensor, k: Tensor, v: Tensor, now_BTH: Tensor, k_before: Tensor, before: Tensor) -> Tensor:
    """Return what reads [B, T, R, H, V] find of their own token, and of those writes of the last one that follow them.

    The read r of a token comes before the writes r + 1 to R of the last one, at the positions of this token.
    """
    R = q.shape[2]
    if R == 1:
        return _scaled(v, now_BTH[:, :, None] * (q * k).sum(-1, dtype=now_BTH.dtype))
    keys, values = torch.cat([k, k_before[:, :, 1:]], dim=2), torch.cat([_times(v, now_BTH), before[:, :, 1:]], dim=2)
    seen = torch.ones(R, 2 * R - 1, dtype=q.dtype, device=q.device)
    seen[:, R:] = seen[:, R:].triu()
    scores_BTHRS = q.transpose(2, 3) @ keys.permute(0, 1, 3, 4, 2)
    return ((scores_BTHRS * seen) @ values.transpose(2, 3)).transpose(2, 3)


def _delayed(x: Tensor, segments: Tensor | None) -> Tensor:
    """Return [B, T, ...] delayed by one token, zero at the start of every sequence."""
    later = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    if segments is None:
        return later
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return later.masked_fill(begins.reshape(*begins.shape, *[1] * (x.dim() - 2)), 0)


def _times(v_BTRHV: Tensor, strength_BTH: Tensor) -> Tensor:
    return _scaled(v_BTRHV, strength_BTH[:, :, None])


def _scaled(v: Tensor, strength: Tensor) -> Tensor:
    return (v * strength[..., None]).to(v.dtype)


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


def _validate_mimo(q: Tensor, k: Tensor, v: Tensor, per_head: dict[str, Tensor]) -> None:
    check_floating({"q": q, "k": k, "v": v, **per_head})
    if q.dim() != 5 or q.shape != k.shape:
        raise ConfigError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, R, H, K].")
    if v.dim() != 5 or v.shape[:4] != q.shape[:4]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, R, H, V] with B, T, R, H = {tuple(q.shape[:4])}.")
    for name, x in per_head.items():
        if x.shape != (q.shape[0], q.shape[1], q.shape[3]):
            raise ConfigError(f"{name} {tuple(x.shape)} must be [B, T, H] = {(q.shape[0], q.shape[1], q.shape[3])}.")


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

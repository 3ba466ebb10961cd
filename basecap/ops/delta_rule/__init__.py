"""The (gated) delta rule: a linear memory that corrects what it holds (arXiv 2406.06484, 2412.06464)."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, check_backend, choose, families, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state, finite_log_decay
from basecap.ops.delta_rule import eager, fla_kernels, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, fla_kernels, eager)


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None = None,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T, o_t = S_t^T q_t (arXiv 2412.06464, eq. 10).

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTHK: queries, already scaled.
        k_BTHK: keys; of Euclidean norm 1 for a memory that stays bounded.
        v_BTHV: values.
        beta_BTH: writing strengths; with keys of norm 1, between 0 (keep) and 1 (overwrite).
        log_decay_BTH: log a_t, at most 0; None: no decay, the plain delta rule (arXiv 2406.06484, eq. 2).
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto" takes the kernels of this package where they run, for heads of more than 128 channels those of
            flash-linear-attention, else plain PyTorch; "triton" (the kernels of this package) and "eager" force one.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    _validate(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH)
    (B, T, H, V), K = v_BTHV.shape, q_BTHK.shape[3]
    check_state(state_BHKV, (B, H, K, V))
    check_segments(segments, (B, T))
    given = {"q": q_BTHK, "k": k_BTHK, "v": v_BTHV, "beta": beta_BTH, "log_decay": log_decay_BTH}
    check_devices({**given, "state": state_BHKV, "segments": segments})
    if log_decay_BTH is not None:
        log_decay_BTH = finite_log_decay(log_decay_BTH)
    if T == 1 and state_BHKV is not None and backend != "triton":
        check_backend(backend)
        with without_autocast(v_BTHV.device):
            return eager.step(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
    run = FAMILIES[choose("delta_rule", backend, FAMILIES, v_BTHV, q_BTHK, segments)]
    if run is fla_kernels:
        return fla_kernels.delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, segments)
    # Under autocast the states would be rounded to half precision between chunks.
    with without_autocast(v_BTHV.device):
        out: tuple[Tensor, Tensor] = run.delta_rule(
            q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, segments
        )
    return out


def influence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None = None,
    *,
    segments: Tensor | None = None,
) -> Influence:
    """Return the factor in front of v_s in o_t of every head: the outputs for unit vectors as values.

    The arguments are those of `delta_rule`, except the values; raises ConfigError as it does.
    """
    _validate(q_BTHK, k_BTHK, k_BTHK, beta_BTH, log_decay_BTH)
    B, T, H, _ = q_BTHK.shape
    check_segments(segments, (B, T))
    q, k, beta = wide(q_BTHK, k_BTHK, beta_BTH)
    log_decay = None if log_decay_BTH is None else log_decay_BTH.to(q.dtype)
    check_devices({"q": q, "k": k, "beta": beta, "log_decay": log_decay, "segments": segments})
    units_TT = torch.eye(T, dtype=q.dtype, device=q.device)

    def factors(heads: slice) -> Tensor:
        own_q, own_k, own_beta = (x[:, :, heads] for x in (q, k, beta))
        decays = None if log_decay is None else log_decay[:, :, heads]
        values = units_TT[:, None].expand(B, T, own_q.shape[2], T)
        return delta_rule(own_q, own_k, values, own_beta, decays, segments=segments)[0].transpose(1, 2)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def _validate(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> None:
    check_floating({"q": q, "k": k, "v": v, "beta": beta})
    if log_decay is not None:
        check_floating({"log_decay": log_decay})
    if q.dim() != 4 or q.shape != k.shape or q.shape[3] < 1:
        raise ConfigError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, H, K] with K at least 1.")
    if v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with B, T, H = {tuple(q.shape[:3])}.")
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        if x is not None and x.shape != v.shape[:3]:
            raise ConfigError(f"{name} {tuple(x.shape)} must be [B, T, H] = {tuple(v.shape[:3])}.")
    if v.shape[1] < 1:
        raise ConfigError("the delta rule needs at least one token.")

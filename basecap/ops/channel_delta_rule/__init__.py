"""The delta rule with a decay, and an erasing strength, for each channel (arXiv 2510.26692, 2605.22791)."""

from collections.abc import Mapping

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose, families, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops.channel_delta_rule import eager, triton_chunks, triton_tokens

#: The fastest first.
FAMILIES = families(triton_chunks, triton_tokens, eager)


def channel_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTHK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (arXiv 2510.26692, eq. 1).

    The delta rule with a decay for each channel of the keys.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTHK: queries, already scaled.
        k_BTHK: keys; of Euclidean norm 1 for a memory that stays bounded.
        v_BTHV: values.
        beta_BTH: writing strengths; with keys of norm 1, between 0 (keep) and 1 (overwrite).
        log_decay_BTHK: log a_t, at most 0.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    _validate(q_BTHK, v_BTHV, {"k": k_BTHK, "log_decay": log_decay_BTHK}, {"beta": beta_BTH})
    erased, written = ((beta_BTH[..., None] * x).to(x.dtype) for x in (k_BTHK, v_BTHV))
    return _run((q_BTHK, k_BTHK, written, erased, log_decay_BTHK), state_BHKV, segments, backend)


def decoupled_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erase_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = (I - k_t (e_t * k_t)^T) diag(a_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (arXiv 2605.22791).

    `channel_delta_rule` with an erasing strength for each channel of the keys; values come times their writing
    strengths. With e = beta and beta v for v the two are the same.

    Args:
        q_BTHK: queries, already scaled.
        k_BTHK: keys; of Euclidean norm 1 for a memory that stays bounded.
        v_BTHV: values times writing strengths.
        erase_BTHK: erasing strengths.
        log_decay_BTHK: log a_t, at most 0.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    _validate(q_BTHK, v_BTHV, {"k": k_BTHK, "erase": erase_BTHK, "log_decay": log_decay_BTHK})
    erased = (erase_BTHK * k_BTHK).to(k_BTHK.dtype)
    return _run((q_BTHK, k_BTHK, v_BTHV, erased, log_decay_BTHK), state_BHKV, segments, backend)


def _run(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor | None,
    segments: Tensor | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Run `decoupled_delta_rule` of q, k, v, e * k and log decays."""
    q, k, v, _, _ = inputs
    (B, T, H, V), K = v.shape, k.shape[3]
    check_state(state, (B, H, K, V))
    check_segments(segments, (B, T))
    check_devices({"q": q, "state": state, "segments": segments})
    run = FAMILIES[choose("channel_delta_rule", backend, FAMILIES, v, k)]
    with without_autocast(v.device):
        out: tuple[Tensor, Tensor] = run.channel_delta_rule(*inputs, state, segments)
    return out


def channel_influence(q_BTHK: Tensor, k_BTHK: Tensor, beta_BTH: Tensor, log_decay_BTHK: Tensor) -> Influence:
    """Return the factor in front of v_s in o_t of every head of `channel_delta_rule`, for a first state of zero.

    The arguments are those of `channel_delta_rule`, except the values; raises ConfigError as it does.
    """
    _validate(q_BTHK, k_BTHK, {"k": k_BTHK, "log_decay": log_decay_BTHK}, {"beta": beta_BTH})
    erase = beta_BTH[..., None].expand(k_BTHK.shape)
    return decoupled_influence(q_BTHK, k_BTHK, erase, log_decay_BTHK).scaled(writes_BTH=beta_BTH)


def decoupled_influence(q_BTHK: Tensor, k_BTHK: Tensor, erase_BTHK: Tensor, log_decay_BTHK: Tensor) -> Influence:
    """Return the factor in front of v_s in o_t of every head of `decoupled_delta_rule`, for a first state of zero.

    The arguments are those of `decoupled_delta_rule`, except the values; raises ConfigError as it does.
    """
    _validate(q_BTHK, k_BTHK, {"k": k_BTHK, "erase": erase_BTHK, "log_decay": log_decay_BTHK})
    erased = (erase_BTHK * k_BTHK).to(k_BTHK.dtype)
    inputs, (B, T, H, _) = wide(q_BTHK, k_BTHK, erased, log_decay_BTHK), q_BTHK.shape

    def factors(heads: slice) -> Tensor:
        return eager.factors(*(x[:, :, heads] for x in inputs))

    return Influence(shape=(B, H, T), device=q_BTHK.device, factors=factors)


def _validate(q: Tensor, v: Tensor, keys: dict[str, Tensor], strengths: Mapping[str, Tensor] = {}) -> None:
    """Check `keys`, by their names, beside q, then v and the strengths of heads."""
    given = {"q": q, "v": v, **keys, **strengths}
    check_floating(given)
    check_devices(given)
    for name, x in keys.items():
        if q.dim() != 4 or x.shape != q.shape or q.shape[3] < 1:
            shapes = f"q {tuple(q.shape)} and {name} {tuple(x.shape)}"
            raise ConfigError(f"{shapes} must both be [B, T, H, K] with K at least 1.")
    if v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with B, T, H = {tuple(q.shape[:3])}.")
    for name, x in strengths.items():
        if x.shape != q.shape[:3]:
            raise ConfigError(f"{name} {tuple(x.shape)} must be [B, T, H] = {tuple(q.shape[:3])}.")
    if v.shape[1] < 1:
        raise ConfigError("the delta rule needs at least one token.")

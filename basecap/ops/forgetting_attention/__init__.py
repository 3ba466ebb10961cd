"""Causal softmax attention whose weights decay with the forget gates between key and query (arXiv 2503.02130)."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose, families
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_scale, check_segments, finite_log_decay
from basecap.ops._sums import running_sums
from basecap.ops.attention import attention_step
from basecap.ops.forgetting_attention import eager, reference, triton_kernels

__all__ = ["forgetting_attention", "forgetting_attention_step", "influence"]

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def forgetting_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend: o_t = sum_{s<=t} softmax_s(scale * q_t.k_s + sum_{s<r<=t} log_decay_r) v_s (arXiv 2503.02130, eq. 4).

    Keys that the gates have closed for all later queries are not read: `README.md` has the bounds.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTHK: queries.
        k_BTHK: keys.
        v_BTHV: values.
        log_decay_BTH: logarithms of the forget gates, at most 0; those of the first token have no effect.
        scale: positive factor of the scores; 1/sqrt(K) when None.
        segments: int64 [B, T], see `Mixer.forward`.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one. The kernels take heads of at most 128 channels
            in float32 or half precision; "auto" then means plain PyTorch for others.

    Returns:
        [B, T, H, V] in the dtype of q.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an invalid scale, or a backend that cannot run.
    """
    scale = _check(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, scale)
    check_segments(segments, q_BTHK.shape[:2])
    check_devices({"q": q_BTHK, "segments": segments})
    run = FAMILIES[choose("forgetting_attention", backend, FAMILIES, q_BTHK, v_BTHV)]
    o_BTHV: Tensor = run.attention(q_BTHK, k_BTHK, v_BTHV, finite_log_decay(log_decay_BTH), scale, segments)
    return o_BTHV


def influence(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    log_decay_BTH: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Influence:
    """Return the attention distribution of every head, the factors in front of the values.

    The arguments are those of `forgetting_attention`, except the values; raises ConfigError as it does.
    """
    scale = _check(q_BTHK, k_BTHK, k_BTHK, log_decay_BTH, scale)
    check_segments(segments, q_BTHK.shape[:2])
    (q, k, log_decay), (B, T, H, _) = wide(q_BTHK, k_BTHK, finite_log_decay(log_decay_BTH)), q_BTHK.shape

    def factors(heads: slice) -> Tensor:
        return reference.weights(q[:, :, heads], k[:, :, heads], log_decay[:, :, heads], scale, segments)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def forgetting_attention_step(
    q_B1HK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    log_decay_BSH: Tensor,
    *,
    scale: float | None = None,
    visible_BS: Tensor | None = None,
) -> Tensor:
    """Attend from the last of S tokens to all of them: the last row of `forgetting_attention`.

    Args:
        q_B1HK: queries of the last token.
        k_BSHK: keys of all tokens, in their order.
        v_BSHV: values.
        log_decay_BSH: logarithms of the forget gates of all tokens, at most 0.
        scale: positive factor of the scores; 1/sqrt(K) when None.
        visible_BS: bool, which tokens the query sees, from the first one on; all when None.

    Returns:
        [B, 1, H, V] in the dtype of q.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an invalid scale.
    """
    if q_B1HK.shape[1:2] != (1,):
        raise ConfigError(f"q {list(q_B1HK.shape)} must have one token; a step takes one at a time.")
    scale = _check(q_B1HK, k_BSHK, v_BSHV, log_decay_BSH, scale, queries=1)
    log_decay = finite_log_decay(log_decay_BSH)
    if visible_BS is not None:
        log_decay = log_decay.masked_fill(~visible_BS[..., None], 0.0)
    # Summed from the end, where the weights that count are.
    bias_BSH = running_sums(log_decay.flip(1), 1).flip(1) - log_decay
    return attention_step(q_B1HK, k_BSHK, v_BSHV, scale=scale, bias_HS=bias_BSH.mT, visible_BS=visible_BS)


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float | None, *, queries: int | None = None
) -> float:
    """Return the scale; raises ConfigError for what does not fit. There are as many queries as keys, or `queries`."""
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    check_floating(given)
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [B, T, H, K], [B, T, H, K] and "
            "[B, T, H, V]."
        )
    B, T, H, K = k.shape
    if q.shape != (B, T if queries is None else queries, H, K):
        raise ConfigError(f"q {list(q.shape)} must be [B, T, H, K] as k {list(k.shape)} is.")
    if log_decay.shape != (B, T, H):
        raise ConfigError(f"log_decay {list(log_decay.shape)} must be [B, T, H] = {[B, T, H]}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"q, k and v must share a dtype, not {q.dtype}, {k.dtype}, {v.dtype}.")
    if T < 1 or K < 1:
        raise ConfigError(f"k {list(k.shape)} must have at least one token and one channel.")
    check_devices(given)
    return check_scale(scale, K)

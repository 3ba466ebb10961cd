"""Causal softmax attention: full, sliding-window, with ALiBi, sinks, grouped heads, over packed segments."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Decision, decide, families, once, taken
from basecap.ops._influence import Influence, of_heads, wide
from basecap.ops._shapes import check_devices, check_floating, check_scale, check_segments, is_whole
from basecap.ops.attention import eager, flex_kernels, reference
from basecap.ops.attention.reference import entropy

__all__ = ["attention", "attention_step", "entropy", "influence"]

#: The fastest first.
FAMILIES = families(flex_kernels, eager)


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    segments: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention o_t = sum_s softmax_s(scale * q_t.k_s - slope * (t - s)) v_s.

    Args:
        q_BTHK: queries, H a multiple of G.
        k_BTGK: keys.
        v_BTGV: values.
        scale: positive factor of the scores; 1/sqrt(K) when None.
        window: a query sees the last `window` positions, itself included; None: all before it.
        slopes: [H], ALiBi slopes (arXiv 2108.12409); None: no bias.
        segments: int64 [B, T], see `Mixer.forward`.
        sinks: [H], a score of every head that joins the denominator of each softmax alone; None: no such term.

    Returns:
        [B, T, H, V] in the dtype of q, or in autocast's where SDPA runs without slopes. Full attention runs on
        PyTorch's SDPA; on a GPU the other forms but sinks run on FlexAttention, elsewhere as blocks of SDPA with a
        mask.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an invalid scale, or a window below 1.
    """
    given = (q_BTHK, k_BTGK, v_BTGV, scale, window, slopes, segments, sinks)
    scale, window, decision = once(("attention",), given, lambda: _decided(*given))
    check_segments(segments, q_BTHK.shape[:2])  # their numbers: nothing else differs from what was decided
    run, slopes = FAMILIES[taken(decision)], _wide_slopes(slopes, q_BTHK)
    o_BTHV: Tensor = run.attention(q_BTHK, k_BTGK, v_BTGV, scale, window, slopes, segments, sinks)
    return o_BTHV


def influence(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    segments: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Influence:
    """Return the attention distribution of every query head, the factors in front of the values of `attention`.

    The arguments are those of `attention`, except the values; raises ConfigError as it does.
    """
    scale, window = _check(q_BTHK, k_BTGK, k_BTGK, scale, window, slopes, segments, sinks)
    slopes = _wide_slopes(slopes, q_BTHK)
    (q, k), (B, T, H, _) = wide(q_BTHK, k_BTGK), q_BTHK.shape

    def factors(heads: slice) -> Tensor:
        own, ends = (None if x is None else x[heads] for x in (slopes, sinks))
        return reference.weights(q[:, :, heads], of_heads(k, heads, H), scale, window, own, segments, ends)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def attention_step(
    q_B1HK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    scale: float | None = None,
    bias_HS: Tensor | None = None,
    visible_BS: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from one query to every key of a cache, o = sum_s softmax_s(scale * q.k_s + bias_s) v_s.

    Several queries, [B, T, H, K], have bias [B, H, T, S] and visible [B, T, S], which must be given.

    Args:
        q_B1HK: queries, H a multiple of G.
        k_BSGK: keys, in any order.
        v_BSGV: values.
        scale: positive factor of the scores; 1/sqrt(K) when None.
        bias_HS: added to the scores; [B, H, S] where sequences differ.
        visible_BS: bool, which keys the query sees; all when None.
        sinks: [H], see `attention`.

    Returns:
        [B, T, H, V] in the dtype of q, or in autocast's without a bias.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an invalid scale.
    """
    _check_keys(q_B1HK, k_BSGK, v_BSGV)
    (B, T, H, _), S = q_B1HK.shape, k_BSGK.shape[1]
    scale = check_scale(scale, q_B1HK.shape[3])
    _check_what_is_seen([B, H, T, S], bias_HS, visible_BS)
    _check_sinks(sinks, H)
    check_devices({"q": q_B1HK, "k": k_BSGK, "v": v_BSGV, "bias": bias_HS, "visible": visible_BS, "sinks": sinks})
    grouped, V = eager.differ(H, k_BSGK.shape[2]), v_BSGV.shape[3]
    if sinks is not None:
        q_B1HK, k_BSGK, v_BSGV = eager.with_sinks(q_B1HK, k_BSGK, v_BSGV, scale, sinks)
        bias_HS = None if bias_HS is None else F.pad(bias_HS, (1, 0))
        visible_BS = None if visible_BS is None else F.pad(visible_BS, (1, 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q_B1HK, k_BSGK, v_BSGV))
    mask = None if visible_BS is None else visible_BS[:, None, None] if visible_BS.dim() == 2 else visible_BS[:, None]
    if bias_HS is None:
        o_BH1V = eager.over_cache(q, k, v, mask, scale, grouped)
    else:
        bias = bias_HS if bias_HS.dim() == 4 else (bias_HS if bias_HS.dim() == 3 else bias_HS[None])[:, :, None]
        bias = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        o_BH1V = eager.biased(q, k, v, bias, scale, grouped)
    return o_BH1V[..., :V].transpose(1, 2)


def _decided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
) -> tuple[float, int | None, Decision]:
    """Return scale, window and what runs; ConfigError for what does not fit."""
    scale, window = _check(q, k, v, scale, window, slopes, segments, sinks)
    plain = window is None and slopes is None and segments is None
    return scale, window, decide("attention", "auto", FAMILIES, q, v, plain, sinks is not None)


def full_attention(q_BTHK: Tensor, v_BTGV: Tensor) -> Decision:
    """Return what full attention runs, for ops that launch it themselves; see `fused`."""
    return decide("attention", "auto", FAMILIES, q_BTHK, v_BTGV, True, False)


def _wide_slopes(slopes: Tensor | None, q: Tensor) -> Tensor | None:
    # Their products with distances must be as exact as the scores.
    return None if slopes is None else slopes.to(torch.promote_types(q.dtype, torch.float32))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    slopes: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
) -> tuple[float, int | None]:
    """Return scale and window in their final form; raises ConfigError for what does not fit."""
    _check_keys(q, k, v)
    B, T, H, K = q.shape
    if k.shape[1] != T:
        raise ConfigError(f"k has {k.shape[1]} tokens where q has {T}.")
    scale = check_scale(scale, K)
    if window is not None and (not is_whole(window) or window < 1):
        raise ConfigError(f"window must be an integer of at least 1, not {window!r}.")
    if slopes is not None:
        check_floating({"slopes": slopes})
        if slopes.shape != (H,):
            raise ConfigError(f"slopes {list(slopes.shape)} must be one per query head, [{H}].")
    check_segments(segments, (B, T))
    _check_sinks(sinks, H)
    check_devices({"q": q, "k": k, "v": v, "slopes": slopes, "segments": segments, "sinks": sinks})
    return scale, None if window is None or window >= T else int(window)


def _check_what_is_seen(sizes: list[int], bias: Tensor | None, visible: Tensor | None) -> None:
    """Raise ConfigError for a bias or visible keys that do not fit queries and keys of these sizes B, H, T and S."""
    B, H, T, S = sizes
    if T != 1 and visible is None:
        raise ConfigError(f"q has {T} tokens, which do not all see the same keys; give visible [B, T, S].")
    if bias is not None:
        check_floating({"bias": bias})
        if bias.shape != (B, H, T, S) and (T != 1 or bias.shape not in ((H, S), (B, H, S))):
            raise ConfigError(
                f"bias {list(bias.shape)} must be [H, S], [B, H, S] or [B, H, T, S] = {[B, H, T, S]}, of several "
                "queries the last."
            )
    if visible is not None and (
        (visible.shape != (B, T, S) and (T != 1 or visible.shape != (B, S))) or visible.dtype != torch.bool
    ):
        raise ConfigError(
            f"visible {list(visible.shape)}, {visible.dtype}, must be bool [B, S] or [B, T, S] = {[B, T, S]}, of "
            "several queries the latter."
        )


def _check_sinks(sinks: Tensor | None, heads: int) -> None:
    if sinks is None:
        return
    check_floating({"sinks": sinks})
    if sinks.shape != (heads,):
        raise ConfigError(f"sinks {list(sinks.shape)} must be one per query head, [{heads}].")


def _check_keys(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor) -> None:
    check_floating({"q": q_BTHK, "k": k_BSGK, "v": v_BSGV})
    q, k, v = list(q_BTHK.shape), list(k_BSGK.shape), list(v_BSGV.shape)
    if not len(q) == len(k) == len(v) == 4 or k[:3] != v[:3] or (q[0], q[3]) != (k[0], k[3]):
        raise ConfigError(f"q {q}, k {k} and v {v} must be [B, T, H, K], [B, S, G, K] and [B, S, G, V].")
    if 0 in k[2:]:
        raise ConfigError(f"k {k} must have at least one head and one channel.")
    if q[2] % k[2]:
        raise ConfigError(f"{q[2]} query heads are not a multiple of {k[2]} key heads.")
    if not q_BTHK.dtype == k_BSGK.dtype == v_BSGV.dtype:
        raise ConfigError(f"q, k and v must share a dtype, not {q_BTHK.dtype}, {k_BSGK.dtype}, {v_BSGV.dtype}.")

"""Causal softmax attention: full, sliding-window, with ALiBi, with grouped heads, over packed segments."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.attention import eager, flex


def attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Causal attention o_t = sum_s softmax_s(scale * q_t.k_s - slope * (t - s)) v_s.

    Args:
        q_BTHK: queries, H a multiple of G.
        k_BTGK: keys.
        v_BTGV: values.
        scale: factor of the scores; 1/sqrt(K) when None.
        window: a query sees the last `window` positions, itself included; None: all before it.
        slopes: [H], ALiBi slopes (arXiv 2108.12409); None: no bias.
        segments: int64 [B, T], see `Mixer.forward`.

    Returns:
        [B, T, H, V] in the dtype of q. Full attention runs on PyTorch's SDPA; on a GPU the other forms run on
        FlexAttention, elsewhere as blocks of SDPA with a mask.

    Raises:
        ConfigError: heads that do not divide or a window below 1.
    """
    if q_BTHK.shape[2] % k_BTGK.shape[2]:
        raise ConfigError(f"{q_BTHK.shape[2]} query heads are no multiple of {k_BTGK.shape[2]} key heads.")
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, not {window}.")
    if window is not None and window >= q_BTHK.shape[1]:
        window = None
    scale = q_BTHK.shape[3] ** -0.5 if scale is None else scale
    plain = window is None and slopes is None and segments is None
    implementation = flex if not plain and flex.supports(q_BTHK, v_BTGV) is None else eager
    return implementation.attention(q_BTHK, k_BTGK, v_BTGV, scale, window, slopes, segments)

"""Linear attention with the second-order Taylor expansion of exp as its kernel (Based, arXiv 2402.18668)."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, Decision, decide, families, once, taken, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state, is_number
from basecap.ops.taylor_attention import eager, reference, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def taylor_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    state_BHFX: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-12,
    backend: Backend = "auto",
) -> Tensor:
    """Return o_t = sum_{s<=t} w_ts v_s / (sum_{s<=t} w_ts + eps), w_ts = 1 + x + x^2 / 2 at x = q_t.k_s / sqrt(K).

    Equation 3 of arXiv 2402.18668 with the denominator of its equation 2; w is at least 1/2.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTHK: queries.
        k_BTHK: keys.
        v_BTHV: values.
        state_BHFX: sums before the first token as `taylor_state` returns them; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        eps: added to the denominator, at least 0.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one. The kernels take neither state nor segments
            and at most 31 features of 128 values; "auto" then means plain PyTorch.

    Returns:
        [B, T, H, V] in the dtype of v.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an invalid eps or backend.
    """
    given = (q_BTHK, k_BTHK, v_BTHV, state_BHFX, segments, eps, backend)
    eps, decision = once(("taylor_attention",), given, lambda: _decided(*given))
    check_segments(segments, v_BTHV.shape[:2])  # their numbers: nothing else differs from what was decided
    run = FAMILIES[taken(decision)]
    # Under autocast the sums would be rounded to half precision.
    with without_autocast(v_BTHV.device):
        o_BTHV: Tensor = run.taylor_attention(q_BTHK, k_BTHK, v_BTHV, state_BHFX, segments, eps)
    return o_BTHV


def _decided(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, segments: Tensor | None, eps: float, backend: Backend
) -> tuple[float, Decision]:
    """Return eps and what runs; ConfigError for invalid arguments."""
    eps = _check_eps(eps)
    _validate(q, k, v, state)
    check_segments(segments, v.shape[:2])
    check_devices({"q": q, "k": k, "v": v, "state": state, "segments": segments})
    return eps, decide("taylor_attention", backend, FAMILIES, v, q, state, segments)


def taylor_state(k_BTHK: Tensor, v_BTHV: Tensor, state_BHFX: Tensor | None = None) -> Tensor:
    """Return the sums that later tokens need, in float32 or wider [B, H, F, V + 1]: of features times [value, 1].

    F = 1 + K + K (K + 1) / 2, the features of `eager.features`; `state_BHFX` holds the sums before the first token.
    Raises ConfigError for shapes, dtypes or devices that do not match.
    """
    _validate(k_BTHK, k_BTHK, v_BTHV, state_BHFX)
    check_devices({"k": k_BTHK, "v": v_BTHV, "state": state_BHFX})
    with without_autocast(v_BTHV.device):
        added = eager.sums(k_BTHK, v_BTHV)
        return added if state_BHFX is None else state_BHFX + added


def influence(q_BTHK: Tensor, k_BTHK: Tensor, *, segments: Tensor | None = None, eps: float = 1e-12) -> Influence:
    """Return the normalised weights w_ts / (sum_s w_ts + eps), the factor in front of v_s in o_t of every head.

    The arguments are those of `taylor_attention`, except the values; raises ConfigError as it does.
    """
    eps = _check_eps(eps)
    _validate(q_BTHK, k_BTHK, k_BTHK, None)
    (q, k), (B, T, H, _) = wide(q_BTHK, k_BTHK), q_BTHK.shape
    check_segments(segments, (B, T))
    check_devices({"q": q, "k": k, "segments": segments})

    def factors(heads: slice) -> Tensor:
        return reference.weights(q[:, :, heads], k[:, :, heads], segments, eps)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


def _check_eps(eps: float) -> float:
    if not is_number(eps):
        raise ConfigError(f"eps must be at least 0 and a Python number, not {eps!r}.")
    if not 0 <= eps < float("inf"):
        raise ConfigError(f"eps must be at least 0 and finite, not {eps!r}.")
    return float(eps)


def _validate(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
    check_floating({"k": k, "q": q, "v": v})
    if q.dim() != 4 or q.shape != k.shape or q.shape[3] < 1:
        raise ConfigError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must both be [B, T, H, K] with K at least 1.")
    if v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with B, T, H = {tuple(q.shape[:3])}.")
    if v.shape[1] < 1:
        raise ConfigError("Taylor attention needs at least one token.")
    (B, _, H, V), K = v.shape, q.shape[3]
    check_state(state, (B, H, 1 + K + K * (K + 1) // 2, V + 1))

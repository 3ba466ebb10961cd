"""The recurrence of RWKV-7: decay per channel plus a generalised delta rule (arXiv 2503.14456)."""

from collections.abc import Mapping
from types import ModuleType

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import choose, families, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops.wkv7 import eager, triton_chunks, triton_tokens

#: The lowest log decay of `wkv7_bounded`; RWKV-7's own are at least -exp(-1/2) = -0.6065.
LOWEST = -0.61

#: The fastest first; the kernels by chunks only take decays that are known to be bounded.
FAMILIES = families(triton_chunks, triton_tokens, eager)
UNBOUNDED = families(triton_tokens, eager)


def wkv7(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = (diag(exp(log_decay_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T, o_t = r_t^T S_t.

    With a = -k, b = beta k, no decay and k scaled by beta this is the delta rule.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        r_BTHK: receptances, what is read with.
        log_decay_BTHK: logarithm of the decays, at most 0.
        k_BTHK: keys.
        v_BTHV: values.
        a_BTHK: what the state is read with before it is written to (RWKV-7: minus the normalised removal key).
        b_BTHK: where the answer is added (RWKV-7: the removal key times the in-context learning rate).
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match.
    """
    inputs = r_BTHK, log_decay_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK
    _validate(*inputs, state_BHKV, segments)
    return _run(UNBOUNDED, inputs, state_BHKV, segments)


def wkv7_bounded(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `wkv7` for decays the caller knows to be bounded: every log decay is at least `LOWEST`, as in RWKV-7.

    On a GPU, half precision runs by chunks where there is more than one chunk and heads have at most 128 channels; with
    stronger decays those kernels overflow. Arguments, results and errors are those of `wkv7`.
    """
    inputs = r_BTHK, log_decay_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK
    _validate(*inputs, state_BHKV, segments)
    return _run(FAMILIES, inputs, state_BHKV, segments)


def _run(
    families: Mapping[str, ModuleType], inputs: tuple[Tensor, ...], state: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, _, k, v, _, _ = inputs
    run = families[choose("wkv7", "auto", families, v, k)]
    with without_autocast(v.device):
        out: tuple[Tensor, Tensor] = run.wkv7(*inputs, state, segments)
    return out


def influence(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    *,
    segments: Tensor | None = None,
) -> Influence:
    """Return the factor in front of v_s in o_t of every head when the first state is zero.

    The arguments are those of `wkv7`, except the values; raises ConfigError as it does.
    """
    _validate(r_BTHK, log_decay_BTHK, k_BTHK, k_BTHK, a_BTHK, b_BTHK, None, segments)
    inputs, (B, T, H, _) = wide(r_BTHK, log_decay_BTHK, k_BTHK, a_BTHK, b_BTHK), r_BTHK.shape

    def factors(heads: slice) -> Tensor:
        r, log_decay, k, a, b = (x[:, :, heads] for x in inputs)
        return eager.factors(r, log_decay, k, a, b, segments)

    return Influence(shape=(B, H, T), device=r_BTHK.device, factors=factors)


def _validate(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
) -> None:
    given = {"log_decay": log_decay, "k": k, "a": a, "b": b}
    check_floating({"r": r, **given, "v": v})
    for name, x in given.items():
        if r.dim() != 4 or x.shape != r.shape or r.shape[3] < 1:
            shapes = f"r {tuple(r.shape)} and {name} {tuple(x.shape)}"
            raise ConfigError(f"{shapes} must both be [B, T, H, K] with K at least 1.")
    if v.dim() != 4 or v.shape[:3] != r.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with {tuple(r.shape[:3])} in front.")
    if r.shape[1] < 1:
        raise ConfigError("wkv7 needs at least one token.")
    (B, T, H, V), K = v.shape, r.shape[3]
    check_state(state, (B, H, K, V))
    check_segments(segments, (B, T))
    check_devices({"r": r, "v": v, **given, "state": state, "segments": segments})

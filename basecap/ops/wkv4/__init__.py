"""RWKV-4's exponentially decaying weighted average of values (arXiv 2305.13048)."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, Decision, decide, once, taken, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops._transforms import refuse_transforms
from basecap.ops.wkv4 import eager, operators
from basecap.ops.wkv4.operators import FAMILIES


def wkv4(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    *,
    state_B2D: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Average values: o_t = sum_{s<=t} w_ts v_s / sum_{s<=t} w_ts for every channel.

    w_ts = exp(k_s - (t - 1 - s) decay) for s < t and w_tt = exp(k_t + bonus).

    It supports first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. `torch.func.vmap` calls it once per slice.

    Args:
        k_BTD: keys, logarithms of weights of any size.
        v_BTD: values.
        decay_D: what a logarithm of a weight loses per token, at least 0.
        bonus_D: what the present token's gains.
        state_B2D: (mean, logarithm of its weight) before the first token; weight -inf for none, as when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, D] in the dtype of v and the final state [B, 2, D] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    inputs = (k_BTD, v_BTD, decay_D, bonus_D, state_B2D)
    given = (*inputs, segments, backend)
    decision = once(("wkv4",), given, lambda: _decided(*given))
    check_segments(segments, v_BTD.shape[:2])  # their numbers: nothing else differs from what was decided
    refuse_transforms("wkv4", *inputs)
    family = taken(decision)
    with without_autocast(v_BTD.device):
        return operators.wkv4(*inputs, segments, family)


def _decided(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
    backend: Backend,
) -> Decision:
    """Return what runs; ConfigError for invalid arguments."""
    _validate(k, v, decay, bonus, segments)
    check_state(state, (len(v), 2, len(decay)))
    check_devices({"k": k, "state": state})
    return decide("wkv4", backend, FAMILIES, v)


def influence(k_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, *, segments: Tensor | None = None) -> Influence:
    """Return the normalised weights w_ts / sum_s w_ts, the factor in front of v_s in o_t of every channel.

    The arguments are those of `wkv4`, except the values; raises ConfigError as it does.
    """
    _validate(k_BTD, k_BTD, decay_D, bonus_D, segments)
    (k, decay, bonus), (B, T, D) = wide(k_BTD, decay_D, bonus_D), k_BTD.shape

    def factors(channels: slice) -> Tensor:
        return eager.weights(k[:, :, channels], decay[channels], bonus[channels], segments)

    return Influence(shape=(B, D, T), device=k.device, factors=factors)


def _validate(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, segments: Tensor | None) -> None:
    given = {"k": k, "v": v, "decay": decay, "bonus": bonus}
    check_floating(given)
    if k.dim() != 3 or k.shape != v.shape:
        raise ConfigError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be [B, T, D].")
    for name, x in (("decay", decay), ("bonus", bonus)):
        if x.shape != v.shape[2:]:
            raise ConfigError(f"{name} {tuple(x.shape)} must be [D] = {tuple(v.shape[2:])}.")
    if v.shape[1] < 1:
        raise ConfigError("wkv4 needs at least one token.")
    check_segments(segments, v.shape[:2])
    check_devices({**given, "segments": segments})

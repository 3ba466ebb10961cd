"""The selective scan: a diagonal state space whose decays depend on channel, state and token (Mamba-1)."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Decision, WithNumba, decide, once, taken, without_autocast
from basecap.ops._influence import Influence, visible, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops._transforms import refuse_transforms, wants_gradients
from basecap.ops.selective_scan import operators, reference
from basecap.ops.selective_scan.operators import FAMILIES


def selective_scan(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    *,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
    backend: WithNumba = "auto",
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = C_t . h_t, per channel (arXiv 2312.00752, eq. 2 and 4).

    It supports first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. `torch.func.vmap` calls it once per slice.

    Args:
        x_BTD: inputs.
        dt_BTD: step sizes, at least 0; preferably float32.
        A_DN: rates, at most 0.
        B_BTN: how each token enters the N states.
        C_BTN: how it reads them.
        state_BDN: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch), "triton" and "numba" (on a CPU) force one.

    Returns:
        y [B, T, D] in the dtype of x and the final state [B, D, N] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    inputs = (x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, state_BDN)
    given = (*inputs, segments, backend)
    decision = once(("selective_scan",), given, lambda: _decided(*given))
    check_segments(segments, x_BTD.shape[:2])  # their numbers: nothing else differs from what was decided
    run = "eager" if decision is None else taken(decision)
    # Under autocast the products with the states would be rounded to half precision.
    with without_autocast(x_BTD.device):
        refuse_transforms("selective_scan", *inputs)
        training = operators.TRAINING if wants_gradients(*inputs) else ""
        y, final, _ = operators.scan(*inputs, segments, run + training)
        return y, final


def _decided(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
    backend: WithNumba,
) -> Decision | None:
    """Return what runs, None where there is nothing to read; ConfigError for invalid arguments."""
    _validate(x, dt, A, B, C, segments)
    check_state(state, (len(x), *A.shape))
    check_devices({"x": x, "state": state})
    # Step sizes in float64 ask for that precision; kernels read at least one number.
    wide = dt if dt.dtype == torch.float64 else x
    return decide("selective_scan", backend, FAMILIES, wide) if x.numel() and A.shape[1] else None


def influence(
    dt_BTD: Tensor, A_DN: Tensor, B_BTN: Tensor, C_BTN: Tensor, *, segments: Tensor | None = None
) -> Influence:
    """Return sum_n C_tn exp(A_n sum_{s<r<=t} dt_r) B_sn dt_s, the factor in front of x_s in y_t of every channel.

    arXiv 2410.15678, section 3.1. The arguments are those of `selective_scan`, except the inputs; raises ConfigError
    as it does.
    """
    _validate(dt_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    (dt, A, Bs, Cs), (B, T, D) = wide(dt_BTD, A_DN, B_BTN, C_BTN), dt_BTD.shape
    seen = visible(T, segments, dt.device)

    def factors(channels: slice) -> Tensor:
        return reference.factors(dt[:, :, channels], A[channels], Bs, Cs).where(seen, 0)

    return Influence(shape=(B, D, T), device=dt.device, factors=factors)


def _validate(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> None:
    check_floating({"x": x, "dt": dt, "A": A, "B": B, "C": C})
    if x.dim() != 3 or x.shape[1] < 1:
        raise ConfigError(f"x {tuple(x.shape)} must be [B, T, D] with at least one token.")
    if A.dim() != 2:
        raise ConfigError(f"A {tuple(A.shape)} must be [D, N] with D = {x.shape[2]}.")
    (batch, T, D), N = x.shape, A.shape[1]
    expected = {"dt": (batch, T, D), "A": (D, N), "B": (batch, T, N), "C": (batch, T, N)}
    for name, tensor in (("dt", dt), ("A", A), ("B", B), ("C", C)):
        if tensor.shape != expected[name]:
            raise ConfigError(f"{name} {tuple(tensor.shape)} must be {expected[name]} for x {tuple(x.shape)}.")
    check_segments(segments, (batch, T))
    check_devices({"x": x, "dt": dt, "A": A, "B": B, "C": C, "segments": segments})

"""The selective scan: a diagonal state space whose decays depend on channel, state and token (Mamba-1)."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.selective_scan import eager


def selective_scan(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    *,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = C_t . h_t, per channel (arXiv 2312.00752, eq. 2 and 4).

    Args:
        x_BTD: inputs.
        dt_BTD: step sizes, at least 0; float32 is advised.
        A_DN: rates, at most 0.
        B_BTN: how each token enters the N states.
        C_BTN: how it reads them.
        state_BDN: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.

    Returns:
        y [B, T, D] in the dtype of x and the final state [B, D, N] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes that do not fit together.
    """
    B, T, D = x_BTD.shape
    N = A_DN.shape[-1]
    if T < 1:
        raise ConfigError("selective_scan needs at least one token.")
    for name, tensor, shape in (
        ("dt", dt_BTD, (B, T, D)),
        ("A", A_DN, (D, N)),
        ("B", B_BTN, (B, T, N)),
        ("C", C_BTN, (B, T, N)),
    ):
        if tensor.shape != shape:
            raise ConfigError(f"{name} {tuple(tensor.shape)} must be {shape} for x {tuple(x_BTD.shape)}.")
    return torch.ops.basecap.selective_scan(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, state_BDN, segments)


@torch.library.custom_op("basecap::selective_scan", mutates_args=())
def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    return eager.forward(x, dt, A, B, C, state, segments)


@torch.library.custom_op("basecap::selective_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return eager.backward((dy, dfinal), x, dt, A, B, C, state, segments)


def _fake_state(x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *A.shape, dtype=torch.promote_types(dt.dtype, torch.float32))


@_scan.register_fake
def _(x, dt, A, B, C, state, segments):
    return torch.empty_like(x, memory_format=torch.contiguous_format), _fake_state(x, dt, A)


@_scan_backward.register_fake
def _(dy, dfinal, x, dt, A, B, C, state, segments):
    like = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (x, dt, A, B, C)]
    return *like, _fake_state(x, dt, A)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy, dfinal):
    x, dt, A, B, C, state, segments = ctx.saved_tensors
    grads = torch.ops.basecap.selective_scan_backward(dy, dfinal, x, dt, A, B, C, state, segments)
    return *grads[:5], grads[5].to(state.dtype) if state is not None else None, None


_scan.register_autograd(_gradients, setup_context=_save)

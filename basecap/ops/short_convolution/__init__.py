"""The short convolution: each channel alone over the last few tokens, with an optional SiLU."""

from typing import Literal

from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._dispatch import Backend, check_backend, choose, families, without_autocast
from basecap.ops._influence import Influence
from basecap.ops._shapes import check_devices, check_floating, check_segments
from basecap.ops.long_convolution import influence as filter_influence
from basecap.ops.short_convolution import eager, triton_kernels

Activation = Literal["none", "silu"]

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def short_convolution(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    *,
    activation: Activation = "none",
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Depthwise causal convolution y_t = act(sum_j weight[:, W-1-j] * x_{t-j} + bias), not reaching across segments.

    Sums are formed in float32 or wider. Any width is allowed; the kernels take widths up to 8, and read an x that is a
    slice of a wider tensor in place as long as its channels lie next to each other.

    It supports derivatives by torch.autograd, second ones only in plain PyTorch; transforms of torch.func (grad, vjp,
    jvp, vmap) and forward mode raise an error, and so do second derivatives of the kernels.

    Args:
        x_BTD: inputs.
        weight_DW: taps of each channel, that of the present token last.
        bias_D: added before the activation; nothing when None.
        activation: "silu" or "none".
        segments: int64 [B, T], see `Mixer.forward`.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        [B, T, D] in the dtype of x.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an unknown activation or backend.
    """
    check_floating({"x": x_BTD, "weight": weight_DW})
    if x_BTD.dim() != 3 or x_BTD.shape[1] < 1:
        raise ConfigError(f"x {tuple(x_BTD.shape)} must be [B, T, D] with at least one token.")
    B, T, D = x_BTD.shape
    if weight_DW.dim() != 2 or weight_DW.shape[0] != D or weight_DW.shape[1] < 1:
        raise ConfigError(f"weight {tuple(weight_DW.shape)} must be ({D}, width) for x {tuple(x_BTD.shape)}.")
    width = weight_DW.shape[1]
    if bias_D is not None:
        check_floating({"bias": bias_D})
        if bias_D.shape != (D,):
            raise ConfigError(f"bias {tuple(bias_D.shape)} must be {(D,)} for x {tuple(x_BTD.shape)}.")
    check_segments(segments, (B, T))
    check_devices({"x": x_BTD, "weight": weight_DW, "bias": bias_D, "segments": segments})
    if activation not in ("none", "silu"):
        raise ConfigError(f"unknown activation {activation!r}: {nearest(activation, ('none', 'silu'))}")
    check_backend(backend)
    silu = activation == "silu"
    # Kernels read at least one number.
    run = FAMILIES[choose("short_convolution", backend, FAMILIES, x_BTD, width)] if x_BTD.numel() else eager
    # Under autocast the sums would be rounded to half precision.
    with without_autocast(x_BTD.device):
        y_BTD: Tensor = run.short_convolution(x_BTD, weight_DW, bias_D, segments, silu)
    return y_BTD


def influence(weight_DW: Tensor, *, batch: int, length: int, segments: Tensor | None = None) -> Influence:
    """Return weight[:, W-1-(t-s)], the factor in front of x_s in y_t of every channel, before any activation.

    Args:
        weight_DW: taps, see `short_convolution`.
        batch: rows B of the inputs; their factors are the same.
        length: their tokens T.
        segments: int64 [B, T], see `Mixer.forward`.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match.
    """
    check_floating({"weight": weight_DW})
    if weight_DW.dim() != 2 or weight_DW.shape[1] < 1:
        raise ConfigError(f"weight {tuple(weight_DW.shape)} must be [D, width] with at least one tap.")
    return filter_influence(weight_DW.flip(1).T, batch=batch, length=length, segments=segments)

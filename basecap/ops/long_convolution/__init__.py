"""Causal convolution with filters as long as the sequence (Hyena, arXiv 2302.10866): as matrix products or by FFT."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose, families, without_autocast
from basecap.ops._influence import Influence, visible, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments
from basecap.ops.long_convolution import eager, reference, triton_kernels

#: The fastest first.
FAMILIES = families(triton_kernels, eager)


def long_convolution(
    u_BTD: Tensor, filter_LD: Tensor, *, segments: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return y_t = sum_{j<L} filter_j * u_{t-j}, channel by channel, from no earlier than the own segment's start.

    Args:
        u_BTD: inputs.
        filter_LD: taps, the one for the present token first; L may be smaller or larger than T.
        segments: int64 [B, T], see `Mixer.forward`. O(T log^2 T) with segments, O(T log T) without.
        backend: "auto"; "eager" (plain PyTorch, by FFT) and "triton" (matrix products) force one. "triton"
            takes no segments; "auto" takes it for 16 bits and at most 4096 taps.

    Returns:
        [B, T, D] in the dtype of u, computed in float32 or wider. Through the FFT an output carries rounding errors
        of the size of its neighbours', also of later ones.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    check_floating({"u": u_BTD, "filter": filter_LD})
    if u_BTD.dim() != 3 or u_BTD.shape[1] < 1:
        raise ConfigError(f"u {tuple(u_BTD.shape)} must be [B, T, D] with at least one token.")
    if filter_LD.dim() != 2 or filter_LD.shape[1] != u_BTD.shape[2] or filter_LD.shape[0] < 1:
        raise ConfigError(f"filter {tuple(filter_LD.shape)} must be [L, {u_BTD.shape[2]}] with at least one tap.")
    check_segments(segments, u_BTD.shape[:2])
    check_devices({"u": u_BTD, "filter": filter_LD, "segments": segments})
    if not u_BTD.numel():
        # The FFT of an empty tensor raises; adding the sum keeps the gradient of the filter defined.
        return u_BTD + filter_LD.sum().to(u_BTD.dtype)
    slower = triton_kernels.slower(u_BTD, filter_LD)
    run = FAMILIES[choose("long_convolution", backend, FAMILIES, u_BTD, segments, slower=slower)]
    with without_autocast(u_BTD.device):
        y_BTD: Tensor = run.long_convolution(u_BTD, filter_LD, segments)
    return y_BTD


def influence(filter_LD: Tensor, *, batch: int, length: int, segments: Tensor | None = None) -> Influence:
    """Return filter_{t-s}, the factor in front of u_s in y_t of every channel, the same in all `batch` rows.

    Args:
        filter_LD: taps, see `long_convolution`.
        batch: rows B of the inputs.
        length: their tokens T.
        segments: int64 [B, T], see `Mixer.forward`.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match.
    """
    check_floating({"filter": filter_LD})
    if filter_LD.dim() != 2 or filter_LD.shape[0] < 1:
        raise ConfigError(f"filter {tuple(filter_LD.shape)} must be [L, D] with at least one tap.")
    check_segments(segments, (batch, length))
    check_devices({"filter": filter_LD, "segments": segments})
    (taps,), seen = wide(filter_LD), visible(length, segments, filter_LD.device)

    def factors(channels: slice) -> Tensor:
        return reference.toeplitz(taps[:, channels], length)[None].expand(batch, -1, -1, -1) * seen

    return Influence(shape=(batch, filter_LD.shape[1], length), device=taps.device, factors=factors)

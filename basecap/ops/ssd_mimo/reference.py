"""The definition of the state space of several writes and reads, any dtype, one token at a time."""

import torch
from torch import Tensor

from basecap.ops.ssd_mimo.inputs import Heads, Strengths


def ssd_mimo(
    q_BTRGK: Tensor,
    k_BTRGK: Tensor,
    v_BTRHV: Tensor,
    strengths: Strengths,
    heads: Heads | None = None,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] and the final state [B, H, K, V]; see `basecap.ops.ssd_mimo.ssd_mimo`."""
    B, T, _, H, V = v_BTRHV.shape
    q, k = (x.repeat_interleave(H // x.shape[3], dim=3) for x in (q_BTRGK, k_BTRGK))
    if heads is not None:
        q, k = (_rotated(x + bias.transpose(0, 1), heads.angles) for x, bias in ((q, heads.q_bias), (k, heads.k_bias)))
    state = v_BTRHV.new_zeros(B, H, q.shape[4], V) if state_BHKV is None else state_BHKV
    now, kept = (strength[..., None, None] for strength in (strengths.now, strengths.kept))
    outputs = []
    for t in range(T):
        decay = torch.exp(strengths.log_decay[:, t])
        if segments is not None and t > 0:
            decay = decay * (segments[:, t] == segments[:, t - 1])[:, None]
        old = decay[..., None, None] * state
        written = torch.einsum("brhk,brhv->bhkv", k[:, t], v_BTRHV[:, t])
        outputs.append(torch.einsum("brhk,bhkv->brhv", q[:, t], old + now[:, t] * written))
        state = old + kept[:, t] * written
    return torch.stack(outputs, dim=1), state


def _rotated(x_BTRHK: Tensor, angles_BTHA: Tensor) -> Tensor:
    """Rotate the first pairs of neighbouring channels."""
    dims = 2 * angles_BTHA.shape[3]
    first, second, rest = x_BTRHK[..., 0:dims:2], x_BTRHK[..., 1:dims:2], x_BTRHK[..., dims:]
    cos, sin = angles_BTHA.cos()[:, :, None], angles_BTHA.sin()[:, :, None]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.flatten(-2), rest], dim=-1)

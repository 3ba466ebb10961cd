"""The state space of several writes and reads as `ssd` over R positions for each token, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER, Backend
from basecap.ops.ssd import ssd
from basecap.ops.ssd_mimo.inputs import Heads, Strengths

RUNS, BACKEND = EAGER, "eager"


def supports(v_BTRHV: Tensor, q_BTRGK: Tensor) -> None:
    """Return None: this runs everywhere."""


def ssd_mimo(
    q_BTRGK: Tensor,
    k_BTRGK: Tensor,
    v_BTRHV: Tensor,
    strengths: Strengths,
    heads: Heads | None,
    state_BHKV: Tensor | None,
    segments: Tensor | None,
    backend: Backend = "eager",
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] and the final state [B, H, K, V]; `backend`: that of `ssd`."""
    log_decay_BTH, now_BTH, kept_BTH = strengths
    R, H = v_BTRHV.shape[2:4]
    q, k = (x.to(v_BTRHV.dtype) for x in of_heads((q_BTRGK, k_BTRGK), H, heads))
    # Every token is written at the next one: what then lies in the state is what a token reads of those before it.
    k_before, v_before = _delayed(k, segments), _delayed(v_BTRHV, segments)
    before = _times(v_before, log_decay_BTH.exp() * _delayed(kept_BTH, segments))
    o, state = ssd(
        q.flatten(1, 2),
        k_before.flatten(1, 2),
        before.flatten(1, 2),
        F.pad(log_decay_BTH[:, :, None], (0, 0, 0, R - 1)).flatten(1, 2),
        state_BHKV=state_BHKV,
        segments=None if segments is None else segments.repeat_interleave(R, dim=1),
        backend=backend,
    )
    o = o.unflatten(1, (-1, R)) + _within(q, k, v_BTRHV, now_BTH, k_before, before)
    last_k, last_v = k[:, -1].to(state.dtype), _times(v_BTRHV, kept_BTH)[:, -1].to(state.dtype)
    return o, state + (last_k[..., None] * last_v[..., None, :]).sum(1)


def step(
    q_B1RGK: Tensor, k_B1RGK: Tensor, v_B1RHV: Tensor, strengths: Strengths, heads: Heads | None, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `ssd_mimo`: outputs [B, 1, R, H, V] and the new state."""
    wide = torch.promote_types(v_B1RHV.dtype, torch.float32)
    q_BHRK, k_BHRK = (
        x[:, 0].transpose(1, 2).to(v_B1RHV.dtype).to(wide)
        for x in of_heads((q_B1RGK, k_B1RGK), v_B1RHV.shape[3], heads)
    )
    decay, now, kept = (
        x[:, 0, :, None, None].to(wide) for x in (strengths.log_decay.exp(), strengths.now, strengths.kept)
    )
    old, written = decay * state_BHKV, k_BHRK.mT @ v_B1RHV[:, 0].transpose(1, 2).to(wide)
    o_BHRV = q_BHRK @ (old + now * written)
    return o_BHRV.transpose(1, 2)[:, None].to(v_B1RHV.dtype), old + kept * written


def of_heads(shared: tuple[Tensor, Tensor], H: int, heads: Heads | None) -> list[Tensor]:
    """Return queries and keys [B, T, R, G, K] as each of H heads has them [B, T, R, H, K]."""
    found = [_repeated(x, H) for x in shared]
    if heads is None:
        return found
    cos, sin = heads.angles.cos()[:, :, None], heads.angles.sin()[:, :, None]
    biases = heads.q_bias, heads.k_bias
    return [_rotate(x + bias_HRK.transpose(0, 1), cos, sin) for x, bias_HRK in zip(found, biases, strict=True)]


def _repeated(x_BTRGK: Tensor, H: int) -> Tensor:
    """Return [B, T, R, H, K], every group once for each of its heads."""
    B, T, R, G, K = x_BTRGK.shape
    return x_BTRGK[:, :, :, :, None].expand(B, T, R, G, H // G, K).flatten(3, 4)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first pairs of neighbouring channels of [B, T, R, H, K] by [B, T, 1, H, A]."""
    dims = 2 * cos.shape[-1]
    pairs, rest = x[..., :dims].unflatten(-1, (-1, 2)), x[..., dims:]
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.flatten(-2), rest], dim=-1)


def _within(q: Tensor, k: Tensor, v: Tensor, now_BTH: Tensor, k_before: Tensor, before: Tensor) -> Tensor:
    """Return what reads [B, T, R, H, V] find of their own token, and of those writes of the last one that follow them.

    The read r of a token comes before the writes r + 1 to R of the last one, at the positions of this token.
    """
    R = q.shape[2]
    if R == 1:
        return _scaled(v, now_BTH[:, :, None] * (q * k).sum(-1, dtype=now_BTH.dtype))
    keys, values = torch.cat([k, k_before[:, :, 1:]], dim=2), torch.cat([_times(v, now_BTH), before[:, :, 1:]], dim=2)
    seen = torch.ones(R, 2 * R - 1, dtype=q.dtype, device=q.device)
    seen[:, R:] = seen[:, R:].triu()
    scores_BTHRS = q.transpose(2, 3) @ keys.permute(0, 1, 3, 4, 2)
    return ((scores_BTHRS * seen) @ values.transpose(2, 3)).transpose(2, 3)


def _delayed(x: Tensor, segments: Tensor | None) -> Tensor:
    """Return [B, T, ...] delayed by one token, zero at the start of every sequence."""
    later = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    if segments is None:
        return later
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return later.masked_fill(begins.reshape(*begins.shape, *[1] * (x.dim() - 2)), 0)


def _times(v_BTRHV: Tensor, strength_BTH: Tensor) -> Tensor:
    return _scaled(v_BTRHV, strength_BTH[:, :, None])


def _scaled(v: Tensor, strength: Tensor) -> Tensor:
    return (v * strength[..., None]).to(v.dtype)

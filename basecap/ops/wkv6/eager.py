"""The RWKV-5 and RWKV-6 recurrence as matrix products over chunks, in plain PyTorch; see `blocks` for the idea."""

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import (
    MASKED_LOG_DECAY,
    TokenBlock,
    assemble,
    carry,
    chunks,
    power_of_two,
    starts,
    unchunk,
)

RUNS, BACKEND = EAGER, "eager"

#: Tokens per block.
CHUNK = 32


def supports(v_BTHV: Tensor, r_BTHK: Tensor) -> None:
    """Return None: this runs everywhere."""


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; computed in float32 or wider, O(T * (CHUNK + K V / CHUNK))."""
    if v_BTHV.shape[1] == 1 and state_BHKV is not None:
        return _step(r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state_BHKV)
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    B, T, H, V = v_BTHV.shape
    r, k, v = (x.to(wide) for x in (r_BTHK, k_BTHK, v_BTHV))
    size = min(CHUNK, power_of_two(T))
    block = _blocks(r, k, log_decay_BTHK.to(wide), segments, size)
    v_BHMCV = chunks(v, size)
    added_BHMKV = block.writes.transpose(-1, -2) @ v_BHMCV
    state = v.new_zeros(B, H, k.shape[3], V) if state_BHKV is None else state_BHKV.to(wide)
    entering, state = carry(block.decay, added_BHMKV, state)
    past_BHMCV = block.reads @ entering
    own = (r * k * bonus_HK.to(wide)).sum(-1, keepdim=True) * v
    o_BTHV = unchunk(block.scores @ v_BHMCV + past_BHMCV, T) + own
    return o_BTHV.to(v_BTHV.dtype), state


def _step(
    r_B1HK: Tensor, k_B1HK: Tensor, v_B1HV: Tensor, log_decay_B1HK: Tensor, bonus_HK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `wkv6`: outputs [B, 1, H, V] and the new state."""
    old = state_BHKV.to(torch.promote_types(v_B1HV.dtype, torch.float32))
    r, k, v, log_decay = (x[:, 0, :, None].to(old.dtype) for x in (r_B1HK, k_B1HK, v_B1HV, log_decay_B1HK))
    own = (r * k * bonus_HK[:, None].to(old.dtype)).sum(-1, keepdim=True) * v
    state = torch.addcmul(k.mT * v, log_decay.exp().mT, old)
    return (r @ old + own).transpose(1, 2).to(v_B1HV.dtype), state


def factors(
    r_BTHK: Tensor, k_BTHK: Tensor, log_decay_BTHK: Tensor, bonus_HK: Tensor, segments: Tensor | None = None
) -> Tensor:
    """Return [B, H, T, T], the factor in front of v_s in o_t when the first state is zero."""
    T = r_BTHK.shape[1]
    block = _blocks(r_BTHK, k_BTHK, log_decay_BTHK, segments, power_of_two(T))
    own_BTH = (r_BTHK * k_BTHK * bonus_HK).sum(-1)
    return block.scores[:, :, 0, :T, :T] + torch.diag_embed(own_BTH.transpose(1, 2))


def _blocks(r: Tensor, k: Tensor, log_decay: Tensor, segments: Tensor | None, size: int) -> TokenBlock:
    """Assemble blocks [B, H, M, ...] of `size` tokens: a token reads before its own decay and write."""
    log_decay = log_decay.expand(-1, r.shape[1], -1, -1)
    new = starts(segments)
    if new is not None:
        new = new[:, :, None, None]
        r, log_decay = r.masked_fill(new, 0.0), log_decay.masked_fill(new, MASKED_LOG_DECAY)
    # The padding, whose log decay is zero, leaves the state as it is.
    parts = chunks(r, size)[..., None, :], chunks(k, size)[..., None, :], chunks(log_decay, size)
    return assemble(*parts)

"""The delta rule by channel as matrix products over chunks, in plain PyTorch; see README.md.

The loop over chunks has two products, W Z and k~^T x; one with the K x K matrix of what a chunk does to its state would
take more operations to make.
"""

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import (
    MASKED_LOG_DECAY,
    TokenBlock,
    assemble,
    chunks,
    power_of_two,
    starts,
    unchunk,
)

RUNS, BACKEND = EAGER, "eager"

#: Tokens per chunk.
CHUNK = 32


def supports(v_BTHV: Tensor, k_BTHK: Tensor) -> None:
    """Return None: this runs everywhere."""


def channel_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    erased_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; computed in float32 or wider, O(T * (CHUNK + K V / CHUNK)).

    `erased` is e * k, what the state is read with before token t writes; values come with their writing strengths.
    """
    if v_BTHV.shape[1] == 1 and state_BHKV is not None:
        return _step(q_BTHK, k_BTHK, v_BTHV, erased_BTHK, log_decay_BTHK, state_BHKV)
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    B, T, H, V = v_BTHV.shape
    size = min(CHUNK, power_of_two(T))
    q, k, erased, log_decay = (x.to(wide) for x in (q_BTHK, k_BTHK, erased_BTHK, log_decay_BTHK))
    block, A_e, A_q = _blocks(q, k, erased, log_decay, segments, size)
    e_in, q_in = block.reads.unflatten(-2, (size, 2)).unbind(-2)
    right = torch.cat([chunks(v_BTHV.to(wide), size), e_in], dim=-1)
    solved = torch.linalg.solve_triangular(A_e, right, upper=False, unitriangular=True)
    state = solved.new_zeros(B, H, k.shape[3], V) if state_BHKV is None else state_BHKV.to(wide)
    written, entering = [], []
    parts = solved[..., :V], solved[..., V:], block.writes.transpose(-1, -2), block.decay[..., None]
    for X, W, k_out, kept in zip(*(part.unbind(2) for part in parts), strict=True):
        entering.append(state)
        written.append(X - W @ state)
        state = kept * state + k_out @ written[-1]
    o_BHMCV = A_q @ torch.stack(written, dim=2) + q_in @ torch.stack(entering, dim=2)
    return unchunk(o_BHMCV, T).to(v_BTHV.dtype), state


def _step(
    q_B1HK: Tensor, k_B1HK: Tensor, v_B1HV: Tensor, erased_B1HK: Tensor, log_decay_B1HK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `channel_delta_rule`: outputs [B, 1, H, V] and the new state."""
    old = state_BHKV.to(torch.promote_types(v_B1HV.dtype, torch.float32))
    inputs = q_B1HK, k_B1HK, v_B1HV, erased_B1HK, log_decay_B1HK
    q, k, v, erased, log_decay = (x[:, 0, :, None].to(old.dtype) for x in inputs)
    kept = log_decay.exp().mT * old
    state = torch.addcmul(kept, k.mT, v - erased @ kept)
    return (q @ state).transpose(1, 2).to(v_B1HV.dtype), state


def factors(q_BTHK: Tensor, k_BTHK: Tensor, erased_BTHK: Tensor, log_decay_BTHK: Tensor) -> Tensor:
    """Return [B, H, T, T], the factor in front of v_s in o_t when the first state is zero."""
    T = q_BTHK.shape[1]
    _, A_e, A_q = _blocks(q_BTHK, k_BTHK, erased_BTHK, log_decay_BTHK, None, power_of_two(T))
    found = torch.linalg.solve_triangular(A_e, A_q, upper=False, left=False, unitriangular=True)
    return found[:, :, 0, :T, :T]


def _blocks(
    q: Tensor, k: Tensor, erased: Tensor, log_decay: Tensor, segments: Tensor | None, size: int
) -> tuple[TokenBlock, Tensor, Tensor]:
    """Assemble blocks of `size` tokens; return rows (token, erased or q), columns (token), and A_e, A_q [..., C, C]."""
    decay = log_decay.exp()
    reads = torch.stack([erased * decay, q * decay], dim=-2)
    new = starts(segments)
    if new is not None:
        reads = reads.masked_fill(new[..., None, None, None], 0.0)
        log_decay = log_decay.masked_fill(new[..., None, None], MASKED_LOG_DECAY)
    reads_BHMC2K = chunks(reads.flatten(-2), size).unflatten(-1, (2, -1))
    # The padding, whose log decay is zero, leaves the state as it is.
    block = assemble(reads_BHMC2K, chunks(k, size)[..., None, :], chunks(log_decay, size))
    A_e, A_q = block.scores.unflatten(-2, (size, 2)).unbind(-2)
    return block, A_e, A_q + torch.diag_embed(chunks((q * k).sum(-1, keepdim=True), size)[..., 0])

"""The RWKV-7 recurrence as matrix products over chunks, in plain PyTorch.

Let Z be the state entering a chunk and u_t = S_{t-1}^T a_t what token t recalls. With the scores of
`_recurrence.blocks` (reads a and r, writes k and b) the recalls of a chunk solve a unit triangular system,

    u = A_ak v + A_ab u + a~ Z    so    u = U + W Z,    U = (1 - A_ab)^-1 A_ak v,    W = (1 - A_ab)^-1 a~,

and what is left between chunks is one product with a K x K matrix:

    o = (A_rk v + A_rb U) + (r~ + A_rb W) Z,    Z' = (diag(decay) + b~^T W) Z + (k~^T v + b~^T U).
"""

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


def supports(v_BTHV: Tensor, k_BTHK: Tensor) -> None:
    """Return None: this runs everywhere."""


def wkv7(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state; computed in float32 or wider, O(T * (CHUNK + K V / CHUNK))."""
    if v_BTHV.shape[1] == 1 and state_BHKV is not None:
        return _step(r_BTHK, log_decay_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, state_BHKV)
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    B, T, H, V = v_BTHV.shape
    size = min(CHUNK, power_of_two(T))
    r, log_decay, k, a, b = (x.to(wide) for x in (r_BTHK, log_decay_BTHK, k_BTHK, a_BTHK, b_BTHK))
    block, (A_ak, A_ab, A_rk, A_rb) = _blocks(r, log_decay, k, a, b, segments, size)
    a_in, r_in = block.reads.unflatten(-2, (size, 2)).unbind(-2)
    k_out, b_out = (x.transpose(-1, -2) for x in block.writes.unflatten(-2, (size, 2)).unbind(-2))
    v_BHMCV = chunks(v_BTHV.to(wide), size)
    U, W = _solve(A_ab, torch.cat([A_ak @ v_BHMCV, a_in], dim=-1)).split([V, a_in.shape[-1]], dim=-1)
    added_BHMKV = k_out @ v_BHMCV + b_out @ U
    step_BHMKK = torch.diag_embed(block.decay) + b_out @ W
    state = v_BHMCV.new_zeros(B, H, k.shape[3], V) if state_BHKV is None else state_BHKV.to(wide)
    entering, state = carry(step_BHMKK, added_BHMKV, state)
    o_BHMCV = A_rk @ v_BHMCV + A_rb @ U + (r_in + A_rb @ W) @ entering
    return unchunk(o_BHMCV, T).to(v_BTHV.dtype), state


def _step(
    r_B1HK: Tensor,
    log_decay_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1HV: Tensor,
    a_B1HK: Tensor,
    b_B1HK: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of `wkv7`: outputs [B, 1, H, V] and the new state."""
    old = state_BHKV.to(torch.promote_types(v_B1HV.dtype, torch.float32))
    inputs = r_B1HK, log_decay_B1HK, k_B1HK, v_B1HV, a_B1HK, b_B1HK
    r, log_decay, k, v, a, b = (x[:, 0, :, None].to(old.dtype) for x in inputs)
    added = torch.addcmul(k.mT * v, b.mT, a @ old)
    state = torch.addcmul(added, log_decay.exp().mT, old)
    return (r @ state).transpose(1, 2).to(v_B1HV.dtype), state


def factors(
    r_BTHK: Tensor,
    log_decay_BTHK: Tensor,
    k_BTHK: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    segments: Tensor | None = None,
) -> Tensor:
    """Return [B, H, T, T], the factor in front of v_s in o_t when the first state is zero."""
    T = r_BTHK.shape[1]
    size = power_of_two(T)
    _, (A_ak, A_ab, A_rk, A_rb) = _blocks(r_BTHK, log_decay_BTHK, k_BTHK, a_BTHK, b_BTHK, segments, size)
    return (A_rk + A_rb @ _solve(A_ab, A_ak))[:, :, 0, :T, :T]


def _solve(A_ab: Tensor, right: Tensor) -> Tensor:
    """Return (1 - A_ab)^-1 right; the unit diagonal is implied."""
    return torch.linalg.solve_triangular(-A_ab, right, upper=False, unitriangular=True)


def _blocks(
    r: Tensor, log_decay: Tensor, k: Tensor, a: Tensor, b: Tensor, segments: Tensor | None, size: int
) -> tuple[TokenBlock, tuple[Tensor, ...]]:
    """Assemble blocks of `size` tokens; a reads before the token's decay and write, r after both.

    Returns the block, rows (token, a or r), columns (token, k or b), and A_ak, A_ab, A_rk, A_rb [..., C, C].
    """
    read_a, read_r = a, r * log_decay.exp()
    new = starts(segments)
    if new is not None:
        new = new[:, :, None, None]
        read_a, read_r = read_a.masked_fill(new, 0.0), read_r.masked_fill(new, 0.0)
        log_decay = log_decay.masked_fill(new, MASKED_LOG_DECAY)
    reads = torch.stack([chunks(read_a, size), chunks(read_r, size)], dim=-2)
    writes = torch.stack([chunks(k, size), chunks(b, size)], dim=-2)
    # The padding, whose log decay is zero, leaves the state as it is.
    block = assemble(reads, writes, chunks(log_decay, size))
    a_and_r = block.scores.unflatten(-1, (size, 2)).unflatten(-3, (size, 2)).unbind(-3)
    (A_ak, A_ab), (A_rk, A_rb) = (rows.unbind(-1) for rows in a_and_r)
    own_k, own_b = (torch.diag_embed(chunks((r * x).sum(-1, keepdim=True), size)[..., 0]) for x in (k, b))
    return block, (A_ak, A_ab, A_rk + own_k, A_rb + own_b)

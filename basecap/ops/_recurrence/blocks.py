"""Linear attention with a decay per channel, assembled from blocks that double in size.

A block of tokens is described by four things, and two neighbours together by the same four, with products only:

    reads   [rows, K]     what each token reads with, decayed from the block's start to the reading
    writes  [columns, K]  what each token writes with, decayed from the writing to the block's end
    decay   [K]           of the whole block
    scores  [rows, columns]  reads . writes inside the block, earlier tokens only

    scores = [[scores_left,                 0           ],      reads  = [reads_left; decay_left * reads_right]
              [reads_right writes_left^T,   scores_right]]      writes = [decay_right * writes_left; writes_right]

No decay is ever divided by another and every factor is at most 1, so nothing overflows, however strong the decays:
an underflow is zero up to rounding. There are log2(length) steps and no loop over tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Logarithm of a decay that leaves nothing, even in float64.
MASKED_LOG_DECAY = -1e4


class TokenBlock(NamedTuple):
    """A block of C tokens with R reads and W writes each: rows are (token, read), columns (token, write)."""

    scores: Tensor  # [..., C * R, C * W], zero where the write is not of an earlier token
    reads: Tensor  # [..., C * R, K]
    writes: Tensor  # [..., C * W, K]
    decay: Tensor  # [..., K]


def assemble(reads: Tensor, writes: Tensor, log_decay: Tensor) -> TokenBlock:
    """Join C single tokens, C a power of two, into one block.

    Args:
        reads: [..., C, R, K], each decayed from just before its token to its own reading.
        writes: [..., C, W, K].
        log_decay: [..., C, K], of each token; leading dimensions may broadcast.
    """
    scores = reads.new_zeros(*reads.shape[:-1], writes.shape[-2])
    decay = log_decay.exp()
    while reads.shape[-3] > 1:
        columns = writes.shape[-2]
        # Not slices, whose gradients would each be filled up with zeros.
        (old_reads, new_reads), (old_writes, new_writes), (old_scores, new_scores) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (reads, writes, scores)
        )
        old_decay, new_decay = decay.unflatten(-2, (-1, 2)).unbind(-2)
        between = new_reads @ old_writes.transpose(-1, -2)
        above = F.pad(old_scores, (0, columns))
        below = torch.cat([between, new_scores], dim=-1)
        scores = torch.cat([above, below], dim=-2)
        reads = torch.cat([old_reads, new_reads * old_decay[..., None, :]], dim=-2)
        writes = torch.cat([old_writes * new_decay[..., None, :], new_writes], dim=-2)
        decay = old_decay * new_decay
    return TokenBlock(scores[..., 0, :, :], reads[..., 0, :, :], writes[..., 0, :, :], decay[..., 0, :])


def carry(step: Tensor, added_BHMKV: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states [B, H, M, K, V] that enter M blocks and the one that leaves the last [B, H, K, V].

    Args:
        step: what a block does to the state: a decay per channel [B, H, M, K], or a matrix [B, H, M, K, K].
        added_BHMKV: what it adds.
        state_BHKV: the state before the first block.
    """
    entering, state = [], state_BHKV
    for now, added in zip(step.unbind(2), added_BHMKV.unbind(2), strict=True):
        entering.append(state)
        state = (now[..., None] * state if now.dim() == 3 else now @ state) + added
    return torch.stack(entering, dim=2), state


def chunks(x_BTHK: Tensor, size: int) -> Tensor:
    """Return [B, H, M, C, K]: chunks of `size` tokens, the last one filled up with zeros."""
    tail = -x_BTHK.shape[1] % size
    return F.pad(x_BTHK, (0, 0, 0, 0, 0, tail)).unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)


def ids_of_chunks(segments_BT: Tensor | None, size: int) -> Tensor | None:
    """Return the segments as [B, M, C], chunks of `size` tokens, the last one filled up with the last segment."""
    if segments_BT is None:
        return None
    tail = -segments_BT.shape[1] % size
    return torch.cat([segments_BT, segments_BT[:, -1:].expand(-1, tail)], dim=1).unflatten(1, (-1, size))


def unchunk(x_BHMCV: Tensor, length: int) -> Tensor:
    """Return [B, T, H, V], undoing `chunks`."""
    return x_BHMCV.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def power_of_two(length: int) -> int:
    """Return the smallest power of two that is at least `length`."""
    return 1 << (length - 1).bit_length()


def starts(segments_BT: Tensor | None) -> Tensor | None:
    """Return [B, T] bool: the first token of each segment but the first; None without segments."""
    if segments_BT is None:
        return None
    changes = segments_BT[:, 1:] != segments_BT[:, :-1]
    return F.pad(changes, (1, 0))


def empty_state(k_BTGK: Tensor, v_BTHV: Tensor) -> Tensor:
    """Return zeros [B, H, K, V] in float32."""
    B, _, H, V = v_BTHV.shape
    return v_BTHV.new_zeros(B, H, k_BTGK.shape[3], V, dtype=torch.float32)


def save_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep a scan's inputs and what it returned besides outputs and final state for its backward pass."""
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # zeros for what is kept would be as large as that
    ctx.save_for_backward(*inputs, *output[2:])

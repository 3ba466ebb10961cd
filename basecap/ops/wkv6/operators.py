"""The Triton kernels of `blocks` as PyTorch operators with their gradients: one graph under torch.compile."""

from typing import Any

import torch
from torch import Tensor


def _kernels():
    # Triton is only needed, and only installed, where its kernels can run.
    from basecap.ops.wkv6 import launch

    return launch


@torch.library.custom_op("basecap::wkv6_assemble", mutates_args=())
def assemble(reads: Tensor, writes: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, reads, writes and decay of a block, float32; see `blocks.assemble`."""
    return _kernels().assemble(reads, writes, log_decay)


@assemble.register_fake
def _(reads, writes, log_decay):
    *lead, C, R, K = reads.shape
    W = writes.shape[-2]
    return (
        reads.new_empty(*lead, C * R, C * W),
        reads.new_empty(*lead, C * R, K),
        reads.new_empty(*lead, C * W, K),
        reads.new_empty(*lead, K),
    )


@torch.library.custom_op("basecap::wkv6_assemble_backward", mutates_args=())
def assemble_backward(
    grad_scores: Tensor,
    grad_reads: Tensor,
    grad_writes: Tensor,
    grad_decay: Tensor,
    reads: Tensor,
    writes: Tensor,
    log_decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of reads, writes and log_decay."""
    return _kernels().assemble_backward((grad_scores, grad_reads, grad_writes, grad_decay), reads, writes, log_decay)


@assemble_backward.register_fake
def _(grad_scores, grad_reads, grad_writes, grad_decay, reads, writes, log_decay):
    return tuple(x.new_empty(x.shape) for x in (reads, writes, log_decay))


def _save_block(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _block_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return assemble_backward(*grads, *ctx.saved_tensors)


assemble.register_autograd(_block_gradients, setup_context=_save_block)


@torch.library.custom_op("basecap::wkv6_carry", mutates_args=())
def carry(step: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Return all M + 1 states [B, H, M + 1, K, V], the given one first; see `blocks.carry`."""
    return _kernels().carry(step, added, state)


@carry.register_fake
def _(step, added, state):
    B, H, M, K, V = added.shape
    return added.new_empty(B, H, M + 1, K, V)


def _save_states(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _state_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G_M = grad_M, G_m = grad_m + step_m^T G_{m+1}: the same recurrence, run backwards."""
    step, states = ctx.saved_tensors
    back = step if step.dim() == 4 else step.transpose(-1, -2)
    G = carry(back.flip(2), grad[:, :, :-1].flip(2), grad[:, :, -1]).flip(2)
    later, earlier = G[:, :, 1:], states[:, :, :-1]
    grad_step = (later * earlier).sum(-1) if step.dim() == 4 else later @ earlier.transpose(-1, -2)
    return grad_step, later, G[:, :, 0]


carry.register_autograd(_state_gradients, setup_context=_save_states)

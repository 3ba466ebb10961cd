"""Launches the Triton kernels of the recurrence of several writes and reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, registers
from basecap.ops.ssd.triton_kernels.launch import sums, sums_bwd
from basecap.ops.ssd_mimo.triton_chunks import BR, CHANNELS, kernels, kernels_backward, tokens_per_chunk


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, the decays within and across chunks, and what every kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    now: Tensor
    kept: Tensor
    q_bias: Tensor
    k_bias: Tensor
    cos: Tensor
    sin: Tensor
    coarse: Tensor
    fine: Tensor
    from_start: Tensor
    to_end: Tensor
    across: Tensor
    ids: Tensor | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """T, R, G, H, K, V, A, M."""
        _, T, R, H, V = self.v.shape
        return T, R, self.q.shape[3], H, self.q.shape[4], V, self.cos.shape[3], self.across.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads, chunks, rows."""
        return self.v.shape[3], self.across.shape[2], len(self.v)

    @property
    def even(self) -> bool:
        """Whether rows begin where 16 numbers do, which takes fewer registers for addresses."""
        return not any(x.shape[-1] % 16 for x in (self.q, self.v, self.cos))

    @property
    def warps(self) -> int:
        """With fewer, registers would spill; with more, the programs of a multiprocessor would be fewer."""
        (_, _, R, _, V), G = self.v.shape, self.q.shape[3]
        usual = self.even and 2 <= R <= 4 and G == 1 and V <= 64
        return 4 if usual and self.v.element_size() == 2 else 8

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time options common to the kernels."""
        return {
            # Float32 inputs are for exactness: their products must not be rounded to TF32.
            "PRECISION": "ieee" if self.v.dtype == torch.float32 else "tf32",
            "RP": triton.next_power_of_2(self.v.shape[2]),
            "BR": BR,
            "BK": min(CHANNELS, block_of(self.q.shape[4])),
            "BV": block_of(self.v.shape[4]),
            "num_warps": self.warps,
        }


def _inputs(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], segments: Tensor | None) -> _Inputs:
    q, k, v, log_decay, now, kept, q_bias, k_bias, cos, sin, _ = (x.contiguous() for x in (q, k, v, *tensors))
    ids = None if segments is None else segments.contiguous()
    found = sums(log_decay, ids, tokens_per_chunk(v.shape[2]))
    return _Inputs(q, k, v, now, kept, q_bias, k_bias, cos, sin, *found, ids)


def _states(inputs: _Inputs, first: Tensor, do: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and the last one; with `do`, from the end, their gradients after each."""
    (B, _, _, H, V), K, M = inputs.v.shape, inputs.q.shape[4], inputs.across.shape[2]
    options = inputs.options
    options["BV"] = min(64, options["BV"])
    if inputs.even and inputs.v.element_size() == 2:
        # Every step of the walk waits for the one before it: two programs of a multiprocessor wait side by side.
        options |= {"num_warps": 8} | registers(128)
    states, last = inputs.v.new_empty(B, M, H, K, V), torch.empty_like(first)
    x, bias, values, weight = inputs.k, inputs.k_bias, inputs.v, inputs.to_end
    if do is not None:
        x, bias, values, weight = inputs.q, inputs.q_bias, do, inputs.from_start
    kernels.states_fwd_kernel[(triton.cdiv(K, options["BK"]) * triton.cdiv(V, options["BV"]), H, B)](
        x, bias, values, inputs.cos, inputs.sin, weight, inputs.kept, inputs.across, first, states, last,
        *inputs.sizes, BACK=do is not None, **options,
    )  # fmt: skip
    return states, last


def forward(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, R, H, V] in the dtype of v and the final state in float32; `tensors`: see `operators`."""
    inputs = _inputs(q, k, v, tensors, segments)
    states, last = _states(inputs, tensors[-1].float().contiguous())
    o = torch.empty_like(inputs.v)
    kernels.output_fwd_kernel[inputs.grid](
        inputs.q, inputs.k, inputs.q_bias, inputs.k_bias, inputs.v, inputs.cos, inputs.sin,
        inputs.coarse, inputs.fine, inputs.from_start, inputs.now, inputs.kept, inputs.ids, states, o,
        *inputs.sizes, PACKED=inputs.ids is not None, **inputs.options,
    )  # fmt: skip
    return o, last


def backward(
    grads: list[Tensor], q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], segments: Tensor | None
) -> list[Tensor]:
    """Return the gradients of q, k, v and `tensors`, see `operators`; states are computed again."""
    inputs = _inputs(q, k, v, tensors, segments)
    B, T, R, H, _ = inputs.v.shape
    G, K, M = *inputs.q.shape[3:], inputs.across.shape[2]
    do, wide = grads[0].contiguous(), inputs.across.new_empty
    states, _ = _states(inputs, tensors[-1].float().contiguous())
    later, dstate = _states(inputs, grads[1].float().contiguous(), do)
    dv, dnow, dkept = (torch.empty_like(x) for x in (inputs.v, inputs.now, inputs.kept))
    read, written, left = wide(3, B, H, T)
    options, dscores = inputs.options, inputs.v.new_empty(B, M, H, BR, BR)
    kernels_backward.values_bwd_kernel[inputs.grid](
        do, inputs.q, inputs.k, inputs.q_bias, inputs.k_bias, inputs.v, inputs.cos, inputs.sin,
        inputs.coarse, inputs.fine, inputs.to_end, inputs.now, inputs.kept, inputs.ids, later,
        dv, dscores, dnow, dkept, read, written, left, *inputs.sizes, PACKED=inputs.ids is not None, **options,
    )  # fmt: skip
    dq, dk, dcos, dsin = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.cos, inputs.sin))
    q_biases, k_biases = wide(2, B, M, H, R, K)
    blocks = triton.cdiv(K, options["BK"])
    entered, passed = wide(blocks, B, H, T), wide(blocks, B, H, M)
    reads, writes = (inputs.q, inputs.q_bias), (inputs.k, inputs.k_bias)
    for (x, bias), (other, other_bias), values, weight, dx, biases in (
        (reads, writes, do, inputs.from_start, dq, q_biases),
        (writes, reads, inputs.v, inputs.to_end, dk, k_biases),
    ):
        kernels_backward.keys_bwd_kernel[(G * blocks, M, B)](
            x, other, bias, other_bias, values, inputs.cos, inputs.sin, weight, inputs.kept, states, later, dscores,
            dx, biases, dcos, dsin, entered, passed, *inputs.sizes, KEYS=x is inputs.k, **options,
        )  # fmt: skip
    parts = (read, written, left, entered, passed)
    dlog = sums_bwd(parts, inputs.across, tensors[0], blocks, tokens_per_chunk(R))
    dq_bias, dk_bias = (
        x.sum((0, 1)).to(bias.dtype) for x, bias in ((q_biases, inputs.q_bias), (k_biases, inputs.k_bias))
    )
    return [dq, dk, dv, dlog, dnow, dkept, dq_bias, dk_bias, dcos, dsin, dstate]

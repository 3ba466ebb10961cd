"""Launches the Triton kernels of the scalar-decay recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from basecap.ops._launch import block_of, dense, registers
from basecap.ops._shapes import lowest_log_decay
from basecap.ops.known_bad import PIPELINES, known_bad_on
from basecap.ops.ssd.triton_kernels import BT, kernels

#: Heads of one program where heads share queries and keys.
HEADS = 8


@dataclass(frozen=True)
class _Inputs:
    """The inputs in rows of one token each, the decays within and across chunks, and what every kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    coarse: Tensor
    fine: Tensor
    from_start: Tensor
    to_end: Tensor
    across: Tensor
    ids: Tensor | None
    #: B, T, G, H, K, V, M.
    shape: tuple[int, int, int, int, int, int, int]

    @property
    def sizes(self) -> tuple[int, ...]:
        """T, G, H, K, V, M."""
        return self.shape[1:]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Numbers from one token to the next in q, k and v."""
        return self.q.stride(0), self.k.stride(0), self.v.stride(0)

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time options common to the kernels of a chunk."""
        exact = self.v.dtype == torch.float32
        BK, BV = block_of(self.shape[4]), block_of(self.shape[5])
        return {
            # Float32 inputs are for exactness: their products must not be rounded to TF32.
            "PRECISION": "ieee" if exact else "tf32",
            "STAGES": 1 if exact else _stages(self.v, BK, BV),
            "BT": BT,
            "BK": BK,
            "BV": BV,
            "num_warps": 8 if exact else 4,
        }


def _stages(v: Tensor, BK: int, BV: int) -> int:
    """Return 3, to load one head or chunk ahead, where the kernel with the most loads has room for it; else 1."""
    if not v.is_cuda or PIPELINES in known_bad_on(v.device):
        return 1
    room = torch.cuda.get_device_properties(v.device).shared_memory_per_multiprocessor
    return 3 if v.element_size() * (BT * BK + 6 * BT * BV + 3 * BK * BV) + 5120 <= room else 1


def _rows(x: Tensor) -> Tensor:
    """Return [B T, channels], without a copy where x is a part of longer rows."""
    return dense(x.flatten(2).flatten(0, 1))


def sums(log_decay: Tensor, ids: Tensor | None, BT: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `decays_fwd_kernel` writes of log decays [B, T, H] in chunks of BT tokens."""
    B, T, H = log_decay.shape
    M = triton.cdiv(T, BT)
    coarse, fine, from_start, to_end = (log_decay.new_empty(B, H, T, dtype=torch.float32) for _ in range(4))
    across = log_decay.new_empty(B, H, M, dtype=torch.float32)
    BH = min(32, triton.next_power_of_2(H))
    kernels.decays_fwd_kernel[(triton.cdiv(H, BH), M, B)](
        log_decay, ids, coarse, fine, from_start, to_end, across, *log_decay.stride(), T, H, M,
        LOWEST=lowest_log_decay(log_decay.dtype), PACKED=ids is not None, BT=BT, BH=BH,
    )  # fmt: skip
    return coarse, fine, from_start, to_end, across


def sums_bwd(parts: Sequence[Tensor], across: Tensor, log_decay: Tensor, blocks: int, BT: int) -> Tensor:
    """Return the gradient of log decays [B, T, H]; `parts` and `blocks` as `decays_bwd_kernel` takes them."""
    B, T, H = log_decay.shape
    M, BH = across.shape[2], min(32, triton.next_power_of_2(H))
    dlog = log_decay.new_empty(B, T, H)
    kernels.decays_bwd_kernel[(triton.cdiv(H, BH), M, B)](
        *parts, across, log_decay, dlog, *log_decay.stride(), T, H, M, blocks,
        LOWEST=lowest_log_decay(log_decay.dtype), BT=BT, BH=BH,
    )  # fmt: skip
    return dlog


def _inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, segments: Tensor | None) -> _Inputs:
    B, T, H, V = v.shape
    G, K = q.shape[2:]
    M = triton.cdiv(T, BT)
    ids = None if segments is None else segments.contiguous()
    coarse, fine, from_start, to_end, across = sums(log_decay, ids, BT)
    shape = (B, T, G, H, K, V, M)
    return _Inputs(_rows(q), _rows(k), _rows(v), coarse, fine, from_start, to_end, across, ids, shape)


def _states(inputs: _Inputs, k: Tensor, v: Tensor, first_BHKV: Tensor | None, back: bool) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (after it, of their gradients, with `back`) and beyond the last one.

    The first is zero when None.
    """
    B, _, _, H, K, V, M = inputs.shape
    options = inputs.options
    options |= {"BK": min(128, options["BK"]), "BV": min(64, options["BV"])}
    options |= registers(168 if options["num_warps"] == 4 else None)
    first = None if first_BHKV is None else first_BHKV.float().contiguous()
    states, last = v.new_empty(B, M, H, K, V), v.new_empty(B, H, K, V, dtype=torch.float32)
    kernels.states_fwd_kernel[(triton.cdiv(K, options["BK"]) * triton.cdiv(V, options["BV"]), H, B)](
        k, v, inputs.from_start if back else inputs.to_end, inputs.across, first, states, last,
        k.stride(0), v.stride(0), *inputs.sizes, BACK=back, **options,
    )  # fmt: skip
    return states, last


def forward(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32."""
    inputs = _inputs(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, segments)
    B, _, G, H, _, _, M = inputs.shape
    states, last = _states(inputs, inputs.k, inputs.v, state_BHKV, back=False)
    o = v_BTHV.new_empty(v_BTHV.shape)
    kernels.output_fwd_kernel[(G * triton.cdiv(H // G, HEADS), M, B)](
        inputs.q, inputs.k, inputs.v, inputs.coarse, inputs.fine, inputs.from_start, inputs.ids, states, o,
        *inputs.strides, *inputs.sizes, HEADS=HEADS, PACKED=inputs.ids is not None,
        **inputs.options,
    )  # fmt: skip
    return o, last


def backward(
    grads: tuple[Tensor, Tensor | None],
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays and the first state; states are computed again."""
    inputs = _inputs(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, segments)
    B, T, G, H, K, _, M = inputs.shape
    do = grads[0].contiguous()
    states, _ = _states(inputs, inputs.k, inputs.v, state_BHKV, back=False)
    later, dstate = _states(inputs, inputs.q, _rows(do), grads[1], back=True)
    options, programs, blocks = inputs.options | {"HEADS": HEADS}, G * triton.cdiv(H // G, HEADS), triton.cdiv(K, 64)
    wide = inputs.across.new_empty
    dv, dscores = torch.empty_like(do), wide(B, M, programs, BT, BT)
    read, written, left = wide(3, B, H, T)
    kernels.values_bwd_kernel[(programs, M, B)](
        do, inputs.q, inputs.k, inputs.v, inputs.coarse, inputs.fine, inputs.to_end, inputs.ids, later,
        dv, read, written, left, dscores, *inputs.strides, *inputs.sizes,
        PACKED=inputs.ids is not None, **options,
    )  # fmt: skip
    dq, dk = (do.new_empty(B, T, G, K) for _ in range(2))
    entered, kept = wide(blocks, B, H, T), wide(blocks, B, H, M)
    # One stage: the gradients of the states go into a product and elsewhere. For such a tile a pipelined loop keeps one
    # buffer less, and on Hopper loads the next tile into it while the product still reads it (Triton 3.6 and 3.7.1).
    options |= {"BK": min(64, options["BK"]), "STAGES": 1}
    kernels.keys_bwd_kernel[(G * blocks, M, B)](
        do, inputs.q, inputs.k, inputs.v, inputs.from_start, inputs.to_end, states, later, dscores,
        dq, dk, entered, kept, *inputs.strides, *inputs.sizes, **options,
    )  # fmt: skip
    dlog = sums_bwd((read, written, left, entered, kept), inputs.across, log_decay_BTH, blocks, BT)
    return dq, dk, dv, dlog, dstate

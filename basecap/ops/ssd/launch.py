"""Launches the Triton kernels of the scalar-decay recurrence."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from basecap.ops.ssd import kernels

#: Tokens per chunk.
BT = 64
#: Numbers of a state that one program carries along.
BX = 1024


@dataclass(frozen=True)
class _Inputs:
    """Contiguous inputs, the sums of log decays within each chunk, and what every kernel takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    coarse: Tensor
    fine: Tensor
    decay_BMH: Tensor
    ids: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """T, G, H, K, V, M."""
        _, T, H, V = self.v.shape
        return T, self.q.shape[2], H, self.q.shape[3], V, triton.cdiv(T, BT)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads, chunks, rows."""
        return self.v.shape[2], triton.cdiv(self.v.shape[1], BT), self.v.shape[0]

    @property
    def options(self) -> dict[str, object]:
        """Compile-time options common to the kernels of a chunk."""
        return {
            "PACKED": self.ids is not None,
            # Float32 inputs are for exactness: their products must not be rounded to TF32.
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "BT": BT,
            "BK": max(16, triton.next_power_of_2(self.q.shape[3])),
            "BV": max(16, triton.next_power_of_2(self.v.shape[3])),
            "num_warps": 8,
        }


def _sums(log_decay_BTH: Tensor) -> Tensor:
    """Return [B, M, BT, H] float64, sums within each chunk; padded with zeros, so that the last is the chunk's."""
    T = log_decay_BTH.shape[1]
    padded = F.pad(log_decay_BTH.double(), (0, 0, 0, -T % BT))
    return padded.unflatten(1, (-1, BT)).cumsum(2)


def _inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, segments: Tensor | None) -> _Inputs:
    T = v.shape[1]
    total_BMCH = _sums(log_decay)
    decay = total_BMCH[:, :, -1].exp().float()
    if segments is not None:
        edges = (
            segments[:, BT - 1 :: BT] if T % BT == 0 else torch.cat([segments[:, BT - 1 :: BT], segments[:, -1:]], 1)
        )
        decay = decay * (edges == torch.cat([segments[:, :1], edges[:, :-1]], 1))[..., None]
        segments = segments.contiguous()
    total_BHT = total_BMCH.flatten(1, 2)[:, :T].mT
    coarse = total_BHT.round()
    fine = (total_BHT - coarse).float().contiguous()
    return _Inputs(
        q.contiguous(), k.contiguous(), v.contiguous(), coarse.float().contiguous(), fine, decay.contiguous(), segments
    )


def _chain(inputs: _Inputs, k: Tensor, v: Tensor, first_BHKV: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (after it, of their gradients, with `back`) and beyond the last one."""
    _, _, H, K, V, M = inputs.sizes
    first = first_BHKV.float().contiguous()
    states, last = first.new_empty(len(v), M, H, K, V), torch.empty_like(first)
    kernels.chunk_fwd_kernel[inputs.grid](
        k, v, inputs.coarse, inputs.fine, inputs.ids, states, *inputs.sizes, BACK=back, **inputs.options
    )
    kernels.carry_fwd_kernel[(triton.cdiv(K * V, BX), H, len(v))](
        states, inputs.decay_BMH, first, last, H, M, K * V, BACK=back, BX=BX
    )
    return states, last


def forward(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32."""
    inputs = _inputs(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, segments)
    states, last = _chain(inputs, inputs.k, inputs.v, state_BHKV, back=False)
    o = torch.empty_like(inputs.v)
    kernels.output_fwd_kernel[inputs.grid](
        inputs.q, inputs.k, inputs.v, inputs.coarse, inputs.fine, inputs.ids, states, o, *inputs.sizes, **inputs.options
    )
    return o, last


def backward(
    grads: tuple[Tensor, Tensor],
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the log decays and the first state; states are computed anew."""
    inputs = _inputs(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, segments)
    K = inputs.q.shape[3]
    do = grads[0].contiguous()
    states, _ = _chain(inputs, inputs.k, inputs.v, state_BHKV, back=False)
    later, dstate = _chain(inputs, inputs.q, do, grads[1], back=True)
    dq, dk = (do.new_empty(*do.shape[:3], K) for _ in range(2))
    dv = torch.empty_like(inputs.v)
    dlog = torch.empty_like(inputs.fine)
    kernels.scan_bwd_kernel[inputs.grid](
        do, inputs.q, inputs.k, inputs.v, inputs.coarse, inputs.fine, inputs.ids, inputs.decay_BMH, states, later,
        dq, dk, dv, dlog, *inputs.sizes, **inputs.options,
    )  # fmt: skip
    dq, dk = (part.unflatten(2, (inputs.q.shape[2], -1)).sum(3, dtype=torch.float32).to(do.dtype) for part in (dq, dk))
    return dq, dk, dv, dlog.mT.to(log_decay_BTH.dtype).contiguous(), dstate

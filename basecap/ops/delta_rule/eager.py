"""The gated delta rule as matrix products over chunks, in plain PyTorch (arXiv 2412.06464, section 3.3).

Within a chunk the corrections depend on each other through a unit triangular system; its solution U - W S (the WY
form) is affine in the state S that enters the chunk. So each chunk maps S to `transition @ S + addition`, and the
only loop is over chunks, one small product each. README.md has the derivation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import ids_of_chunks
from basecap.ops._sums import exact_dtype, running_sums

RUNS, BACKEND = EAGER, "eager"


def supports(v_BTHV: Tensor, q_BTHK: Tensor, segments: Tensor | None) -> None:
    """Return None: this runs everywhere."""


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None = None,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V].

    Memory is O(T * (chunk + K + V) + T / chunk * K * (K + V)) per head. Chunks hold at most `chunk` tokens; by default
    no more than K (within 16 to 64): with more keys than dimensions, the keys are so dependent that errors triple.
    """
    B, T, H, V = v_BTHV.shape
    K = q_BTHK.shape[3]
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    C = min(chunk or max(16, min(64, K)), T)
    M = -(-T // C)
    tail = M * C - T

    def cut(x: Tensor) -> Tensor:
        """[B, T, H, ...] to [B, M, C, H, ...]; padded keys are zero, so padding leaves the state alone."""
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, tail)).unflatten(1, (M, C))

    # Products that are not accumulated further run in the dtype of v, which is much faster on a GPU.
    q, k, v = (cut(x.to(v_BTHV.dtype)).movedim(3, 1) for x in (q_BTHK, k_BTHK, v_BTHV))
    beta = cut(beta_BTH.to(wide)).movedim(3, 1)[..., None]
    ids_BMC = ids_of_chunks(segments, C)
    log_decay = torch.zeros_like(beta_BTH) if log_decay_BTH is None else log_decay_BTH
    # Differences of these sums are the exponents: in float32 strong decays would leave few digits for weak ones.
    total = running_sums(cut(log_decay.to(exact_dtype(log_decay.device))), 2)
    within, from_start, to_end, across = _decays(total.movedim(3, 1), ids_BMC, wide)

    k_t = k.transpose(-1, -2)
    system = (k @ k_t) * (beta * within)
    right = torch.cat([beta * v, (beta * from_start) * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).to(v.dtype)
    seen = ((q @ k_t) * within).to(v.dtype) @ solved
    stored = (k * to_end).to(v.dtype).transpose(-1, -2) @ solved

    addition = stored[..., :V].to(wide)
    transition = across * torch.eye(K, dtype=wide, device=k.device) - stored[..., V:]
    state = addition.new_zeros(B, H, K, V) if state_BHKV is None else state_BHKV.to(wide)
    entering = []
    for added, transit in zip(addition.unbind(2), transition.unbind(2), strict=True):
        entering.append(state)
        state = added + transit @ state
    reads = (q * from_start - seen[..., V:]).to(v.dtype)
    o = seen[..., :V] + reads @ torch.stack(entering, dim=2).to(v.dtype)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v_BTHV.dtype), state


def step(
    q_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1HV: Tensor,
    beta_B1H: Tensor,
    log_decay_B1H: Tensor | None,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of `delta_rule`: outputs [B, 1, H, V] and the new state."""
    kept = state_BHKV.to(torch.promote_types(v_B1HV.dtype, torch.float32))
    q, k, v, beta = (x[:, 0, ..., None, :].to(kept.dtype) for x in (q_B1HK, k_B1HK, v_B1HV, beta_B1H[..., None]))
    if log_decay_B1H is not None:
        kept = log_decay_B1H[:, 0, :, None, None].to(kept.dtype).exp() * kept
    state = kept + k.transpose(-1, -2) * (beta * (v - k @ kept))
    return (q @ state).transpose(1, 2).to(v_B1HV.dtype), state


def _decays(total: Tensor, ids_BMC: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the decays between positions [B, H, M, C, C], from the chunk's start, to its end, over all of it.

    `total` is the sum of log decays since the chunk's start [B, H, M, C]; the last three results are
    [B, H, M, C or 1, 1]. A decay over the edge of a segment is zero.
    """
    C = total.shape[-1]
    visible = torch.ones(C, C, dtype=torch.bool, device=total.device).tril()
    from_start, to_end = total.to(wide).exp(), (total[..., -1:] - total).to(wide).exp()
    across = from_start[..., -1:]
    if ids_BMC is not None:
        ids_BHMC = ids_BMC[:, None]
        last = ids_BHMC[..., -1:]
        before = torch.cat([ids_BHMC[:, :, :1, :1], last[:, :, :-1]], dim=2)
        visible = visible & (ids_BHMC[..., :, None] == ids_BHMC[..., None, :])
        from_start = from_start * (ids_BHMC == before)
        to_end = to_end * (ids_BHMC == last)
        across = across * (last == before)
    # Masked before the exponential, which would overflow above the diagonal and make the gradient NaN.
    exponent = (total[..., :, None] - total[..., None, :]).to(wide).masked_fill(~visible, float("-inf"))
    return exponent.exp(), from_start[..., None], to_end[..., None], across[..., None]

"""The scalar-decay recurrence as matrix products over chunks (arXiv 2405.21060, section 6), in plain PyTorch.

Within a chunk the outputs are a masked attention; between chunks only the state at each chunk's end matters, and
those states are combined by one more masked product. There is no loop over time steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import ids_of_chunks
from basecap.ops._shapes import finite_log_decay
from basecap.ops._sums import exact_dtype, running_sums

RUNS, BACKEND = EAGER, "eager"

#: Chunks whose states are combined by one product; more of them are taken block by block.
SPAN = 64


def supports(v_BTHV: Tensor, q_BTGK: Tensor) -> None:
    """Return None: this runs everywhere."""


def ssd(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    final: bool = True,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the final state [B, H, K, V]; memory O(T * chunk + T / chunk * K * V) per head.

    Matrix products run in the dtype of v, decays and states in float32 or wider. Without `final` the state may lack.
    """
    B, T, H, V = v_BTHV.shape
    G = q_BTGK.shape[2]
    R = H // G
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    C = min(chunk, T)
    M = -(-T // C)
    tail = M * C - T

    def cut(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, tail)) if tail else x  # padding by nothing copies
        return padded.unflatten(1, (M, C))

    q_BMGCK, k_BMGCK = (cut(x).transpose(2, 3) for x in (q_BTGK, k_BTGK))
    v_BMGCRV = cut(v_BTHV).unflatten(3, (G, R)).transpose(2, 3)
    # Differences of these sums are the exponents: in float32 strong decays would leave few digits for weak ones.
    total_BMCH = running_sums(cut(finite_log_decay(log_decay_BTH).to(exact_dtype(log_decay_BTH.device))), 2)
    ids_BMC = ids_of_chunks(segments, C)
    within, to_end, from_start = _decays(total_BMCH, ids_BMC, wide)

    scores_BMGCC = q_BMGCK @ k_BMGCK.transpose(-1, -2)
    weights = scores_BMGCC[:, :, :, None] * within.unflatten(2, (G, R))
    own_BMGRCV = weights.to(v_BTHV.dtype) @ v_BMGCRV.transpose(3, 4)

    def per_position(x_BMCH: Tensor) -> Tensor:
        return x_BMCH.unflatten(3, (G, R)).transpose(2, 3)[..., None]

    o_BMGCRV, last = own_BMGRCV.transpose(3, 4), v_BTHV.new_empty(0, dtype=wide)
    if final or M > 1 or state_BHKV is not None:
        left = (v_BMGCRV * per_position(to_end)).to(v_BTHV.dtype).flatten(-2)
        added_BMGKRV = (k_BMGCK.transpose(-1, -2) @ left).to(wide).unflatten(-1, (R, V))
        added_BMHKV = added_BMGKRV.transpose(3, 4).flatten(2, 3)
        last = added_BMHKV[:, -1]
    if M == 1 and state_BHKV is not None and segments is None:
        # Few tokens may follow a large state, which is read as it lies.
        old = state_BHKV.to(wide)
        queries_BHCK = q_BMGCK[:, 0].repeat_interleave(R, dim=1)
        past_BHCV = (queries_BHCK @ old.to(v_BTHV.dtype)) * from_start[:, 0].transpose(1, 2)[..., None]
        o_BMGCRV = o_BMGCRV + past_BHCV.unflatten(1, (G, R)).transpose(2, 3)[:, None]
        last = torch.addcmul(last, old, total_BMCH[:, 0, -1].to(wide).exp()[..., None, None])
    elif M > 1 or state_BHKV is not None:
        states_BMHKV, last = _carry(added_BMHKV, total_BMCH[:, :, -1], ids_BMC, state_BHKV)
        entering = states_BMHKV.unflatten(2, (G, R)).transpose(3, 4).flatten(-2)
        past = (q_BMGCK @ entering.to(v_BTHV.dtype)).unflatten(-1, (R, V)) * per_position(from_start)
        o_BMGCRV = o_BMGCRV + past
    o_BTHV = o_BMGCRV.transpose(2, 3).reshape(B, M * C, H, V)[:, :T]
    return o_BTHV.to(v_BTHV.dtype), last


def step(
    q_B1GK: Tensor, k_B1GK: Tensor, v_B1HV: Tensor, log_decay_B1H: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `ssd`: outputs [B, 1, H, V] and the new state."""
    old = state_BHKV.to(torch.promote_types(v_B1HV.dtype, torch.float32))
    repeat = v_B1HV.shape[2] // q_B1GK.shape[2]
    q_BHK, k_BHK = (x[:, 0].to(old.dtype).repeat_interleave(repeat, dim=1) for x in (q_B1GK, k_B1GK))
    added = k_BHK[..., None] * v_B1HV[:, 0, :, None, :]
    state = log_decay_B1H[:, 0].to(old.dtype).exp()[..., None, None] * old + added
    return (q_BHK[..., None, :] @ state).transpose(1, 2).to(v_B1HV.dtype), state


def _decays(total_BMCH: Tensor, ids_BMC: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decay between positions [B, M, H, C, C], to the chunk's end and from its start [B, M, C, H]."""
    to_end = (total_BMCH[:, :, -1:] - total_BMCH).to(wide).exp()
    from_start = total_BMCH.to(wide).exp()
    same = None
    if ids_BMC is not None:
        same = (ids_BMC[..., :, None] == ids_BMC[..., None, :])[:, :, None]
        to_end = to_end * (ids_BMC == ids_BMC[..., -1:])[..., None]
        before = torch.cat([ids_BMC[:, :1, 0], ids_BMC[:, :-1, -1]], dim=1)
        from_start = from_start * (ids_BMC == before[..., None])[..., None]
    return _between(total_BMCH.transpose(2, 3), same, wide), to_end, from_start


def _between(total: Tensor, same: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return [..., t, s] = exp(total_t - total_s) for s <= t (where `same` allows it), else 0."""
    visible = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    if same is not None:
        visible = visible & same
    hidden = torch.zeros(visible.shape, dtype=wide, device=total.device).masked_fill_(~visible, float("-inf"))
    # Masked before the exponential: above the diagonal it would overflow and spoil the gradient. Masked by a sum, whose
    # backward pass is free; in place, since fresh memory takes longer to fetch than to fill.
    return (total[..., :, None] - total[..., None, :]).to(wide).add_(hidden).exp_()


def _carry(
    added_BMHKV: Tensor, log_decay_BMH: Tensor, ids_BMC: Tensor | None, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state that enters each chunk [B, M, H, K, V] and the one that leaves the last [B, H, K, V]."""
    K, V = added_BMHKV.shape[-2:]
    entering, state = [], state_BHKV
    for start in range(0, added_BMHKV.shape[1], SPAN):
        span = slice(start, start + SPAN)
        own_BHMX = added_BMHKV[:, span].transpose(1, 2).flatten(-2)
        # Row i: what is left of each chunk's addition when chunk i begins; the last row when the span ends.
        total_BHM = running_sums(F.pad(log_decay_BMH[:, span].transpose(1, 2), (1, 0)), 2)
        same = None
        if ids_BMC is not None:
            first = ids_BMC[:, 0, :1] if start == 0 else ids_BMC[:, start - 1, -1:]
            ids = torch.cat([first, ids_BMC[:, span, -1]], dim=1)
            same = (ids[:, :, None] == ids[:, None, :])[:, None]
        factor_BHMM = _between(total_BHM, same, own_BHMX.dtype)
        # The addition of chunk j is complete, undecayed, at boundary j + 1; boundary 0 holds the given state.
        after = factor_BHMM[..., 1:] @ own_BHMX
        if state is not None:
            after = after + factor_BHMM[..., :1] * state.to(after.dtype).flatten(-2)[:, :, None]
        after_BMHKV = after.unflatten(-1, (K, V)).transpose(1, 2)
        entering.append(after_BMHKV[:, :-1])
        state = after_BMHKV[:, -1]
    return torch.cat(entering, dim=1), after_BMHKV[:, -1]

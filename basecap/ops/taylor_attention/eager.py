"""Taylor attention over chunks, in plain PyTorch: masked scores within a chunk, sums of features for what is before.

The weight 1 + x + x^2/2 at x = q.k / sqrt(K) is an inner product of `features`, so the keys and values of all
earlier chunks enter through one matrix per head (arXiv 2402.18668, section 3.1).
"""

import torch
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import chunks, ids_of_chunks

RUNS, BACKEND = EAGER, "eager"


def supports(v_BTHV: Tensor, q_BTHK: Tensor, state_BHFX: Tensor | None, segments: Tensor | None) -> None:
    """Return None: this runs everywhere."""


def features(x: Tensor) -> Tensor:
    """Map [..., K] to [..., 1 + K + K (K + 1) / 2] so that features(q) . features(k) = 1 + x + x^2 / 2.

    The products x_i x_j and x_j x_i are one feature; arXiv 2402.18668, section 4.1, keeps both.
    """
    K = x.shape[-1]
    i, j = torch.triu_indices(K, K, device=x.device)
    one_hot = torch.eye(K, dtype=x.dtype, device=x.device)
    left = one_hot[:, i] * torch.full_like(one_hot[i, j], K**-0.5).masked_fill(i == j, (2 * K) ** -0.5)
    # Two products with constant matrices: their backward needs no scattered sums, unlike that of indexing.
    return torch.cat([torch.ones_like(x[..., :1]), x * K**-0.25, (x @ left) * (x @ one_hot[:, j])], dim=-1)


def sums(k_BTHK: Tensor, v_BTHV: Tensor) -> Tensor:
    """Return the sum over all tokens of features(k) times [v, 1], float32 or wider [B, H, F, V + 1]."""
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    return torch.einsum("bthf,bthx->bhfx", features(k_BTHK.to(wide)), _with_one(v_BTHV.to(wide)))


def taylor_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    state_BHFX: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-12,
    chunk: int = 128,
) -> Tensor:
    """Return outputs [B, T, H, V], computed in float32 or wider; memory O(T * (chunk + K^2) + T / chunk * K^2 V)."""
    (_, T, _, V), K = v_BTHV.shape, q_BTHK.shape[3]
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    C = min(chunk, T)
    # What pads the last chunk is later than every token.
    q, k, v = (chunks(x.to(wide), C) for x in (q_BTHK, k_BTHK, v_BTHV))
    v = _with_one(v)
    ids_BMC = ids_of_chunks(segments, C)
    ids = None if ids_BMC is None else ids_BMC[:, None]
    x = q @ k.transpose(-1, -2) * K**-0.5
    visible = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    if ids is not None:
        visible = visible & (ids[..., :, None] == ids[..., None, :])
    total = (1 + x + x.square() / 2).masked_fill(~visible, 0) @ v
    if T > C or state_BHFX is not None:
        total = total + _from_before(q, k, v, ids, state_BHFX)
    o = total[..., :V] / (total[..., V:] + eps)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v_BTHV.dtype)


def _from_before(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, state_BHFX: Tensor | None) -> Tensor:
    """Return what the sums that enter each chunk contribute [B, H, M, C, V + 1]; `ids` are [B, 1, M, C]."""
    q, k = features(q), features(k[:, :, :-1])
    kept = None
    if ids is not None:
        # Sums enter a chunk with the segment of the last token before it, and reach only that segment's tokens.
        last = ids[..., -1:]
        before = torch.cat([ids[:, :, :1, :1], last[:, :, :-1]], dim=2)
        q, k = q * (ids == before)[..., None], k * (ids == last)[:, :, :-1, :, None]
        kept = (last == before)[..., None]
    added = k.transpose(-1, -2) @ v[:, :, :-1]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if state_BHFX is None else state_BHFX.to(q.dtype)
    entering = [state]
    for m, now in enumerate(added.unbind(2)):
        state = now + (state if kept is None else state * kept[:, :, m])
        entering.append(state)
    return q @ torch.stack(entering, dim=2)


def _with_one(v: Tensor) -> Tensor:
    """Append a column of ones, which sums the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)

"""The definition of Top-1 chunk selection (arXiv 2505.18522, section 5), any dtype, T x T in memory."""

import torch
from torch import Tensor


def _chunks(T: int, chunk: int, segments_BT: Tensor) -> Tensor:
    """Return [B, T] int64: each position's chunk, numbered from 0 along the row; a segment starts a new chunk."""
    t = torch.arange(T, device=segments_BT.device).expand_as(segments_BT)
    fresh = torch.ones_like(segments_BT, dtype=torch.bool)
    fresh[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    since = t - torch.where(fresh, t, 0).cummax(dim=1).values
    return (since % chunk == 0).cumsum(dim=1) - 1


def visible(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    chunk: int,
    mode: str,
    scale: float,
    remote: int = 1,
    segments: Tensor | None = None,
    choice_BTHM: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mask [B, H, T, T] of attended positions and the chunk scores [B, H, T, M], -inf where no candidate.

    Args:
        q_BTHK: queries.
        k_BTGK: keys.
        chunk: chunk size C.
        mode: "exact", the score of a chunk is the logarithm of its attention mass, or "approx", its mean score.
        scale: factor of q.k.
        remote: number of remote chunks.
        segments: int64 [B, T], see `top1_chunk`.
        choice_BTHM: bool, take these chunks (numbered along the row) instead of choosing.
    """
    B, T, H, _ = q_BTHK.shape
    if segments is None:
        segments = torch.zeros(B, T, dtype=torch.int64, device=q_BTHK.device)
    chunk_BT = _chunks(T, chunk, segments)
    M = int(chunk_BT.max()) + 1 if B else 0
    k_BTHK = k_BTGK.repeat_interleave(H // k_BTGK.shape[2], dim=2)
    s_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * scale
    member_BMT = chunk_BT[:, None] == torch.arange(M, device=q_BTHK.device)[:, None]
    if mode == "exact":
        inside = s_BHTT[:, :, :, None].masked_fill(~member_BMT[:, None, None], float("-inf"))
        score_BHTM = inside.logsumexp(-1)
    else:
        share_BMT = member_BMT / member_BMT.sum(-1, keepdim=True)
        score_BHTM = torch.einsum("bhts,bms->bhtm", s_BHTT, share_BMT.to(s_BHTT.dtype))
    earlier_BTM = torch.arange(M, device=q_BTHK.device) < chunk_BT[..., None]
    same_BTM = torch.einsum("bts,bms->btm", (segments[:, :, None] == segments[:, None]).float(), member_BMT.float()) > 0
    score_BHTM = score_BHTM.masked_fill(~(earlier_BTM & same_BTM)[:, None] | score_BHTM.isnan(), float("-inf"))
    if choice_BTHM is None:
        # A stable sort puts the lowest index first among equals.
        order = score_BHTM.sort(dim=-1, descending=True, stable=True).indices[..., :remote]
        chosen_BHTM = torch.zeros_like(score_BHTM, dtype=torch.bool).scatter(-1, order, True)
        chosen_BHTM = chosen_BHTM & (score_BHTM > float("-inf"))
    else:
        chosen_BHTM = choice_BTHM.transpose(1, 2)
    t = torch.arange(T, device=q_BTHK.device)
    local_BTT = (chunk_BT[:, :, None] == chunk_BT[:, None]) & (t[:, None] >= t)
    remote_BHTT = torch.einsum("bhtm,bms->bhts", chosen_BHTM.float(), member_BMT.float()) > 0
    return local_BTT[:, None] | remote_BHTT, score_BHTM


def weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    chunk: int,
    mode: str,
    scale: float,
    remote: int = 1,
    segments: Tensor | None = None,
    choice_BTHM: Tensor | None = None,
) -> Tensor:
    """Return the attention distribution [B, H, T, T]: one softmax over the own chunk's past and the chosen chunks."""
    with torch.no_grad():
        mask_BHTT, _ = visible(q_BTHK, k_BTGK, chunk, mode, scale, remote, segments, choice_BTHM)
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], dim=2)
    s_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * scale
    return s_BHTT.masked_fill(~mask_BHTT, float("-inf")).softmax(-1)


def top1_chunk(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, weights_BHTT: Tensor) -> Tensor:
    """Return [B, T, H, K], the values weighted by `weights`."""
    v_BTHK = v_BTGK.repeat_interleave(q_BTHK.shape[2] // v_BTGK.shape[2], dim=2)
    return torch.einsum("bhts,bshk->bthk", weights_BHTT, v_BTHK)

"""Signed reading of pairs: what |factor| at the value of a pair does not show."""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from basecap.ops import Influence

#: Tokens after a value at which its pair may be read: a short convolution of four tokens moves it by up to three.
LAGS = 4


def signed_reads(
    influence: Influence, sizes_RTT: Tensor, places_NPT: Tensor, first_NTP: Tensor, second_NTP: Tensor
) -> NDArray[np.float32]:
    """Return how much scored positions read their own and the other pair, with sign: float32 [N, 2, H + 1, LAGS].

    The last axis is the distance from the values to the positions that are read. The last head is the mean of |factor|
    over the heads. All are shares of the sum of a row of that mean, summed over the values of a pair and averaged over
    positions and both readings.

    Args:
        influence: of R = 2 N readings, the second N with other queries.
        sizes_RTT: `influence.mean_size()`.
        places_NPT: 1 at the values of each pair.
        first_NTP: 1 where a position queries a pair in the first reading.
        second_NTP: the same in the second reading.
    """
    length = places_NPT.shape[-1]
    scale_RTT = sizes_RTT.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes_RTT.dtype).tiny)
    moved = [torch.nn.functional.pad(places_NPT, (lag, 0))[..., :length] for lag in range(LAGS)]
    places_NSPL = torch.stack(moved, dim=-1).transpose(1, 2).to(sizes_RTT)
    first, second = (mask.to(sizes_RTT)[:, None, ..., None] for mask in (first_NTP, second_NTP))
    positions = first.sum((1, 2, 3, 4)).clamp(min=1)
    parts = []
    # Rows are scaled before they are summed, else a few rows with large factors would decide: a second pass.
    for block_RHTT in itertools.chain(influence.blocks(), [sizes_RTT[:, None]]):
        shares = (block_RHTT.to(sizes_RTT) / scale_RTT[:, None]).unflatten(0, (2, -1))
        before, after = (torch.einsum("nhts,nspl->nhtpl", reading, places_NSPL) for reading in shares)
        own = (before * first + after * second).sum((2, 3))
        other = (before * second + after * first).sum((2, 3))
        parts.append(torch.stack([own, other], dim=1) / (2 * positions[:, None, None, None]))
    return torch.cat(parts, dim=2).float().cpu().numpy()


def signed_score(reads: NDArray[np.floating]) -> tuple[NDArray[np.float64], int] | None:
    """Return the three parts of a signed score of each example, [N, 3], and its lag in tokens; None below 2 examples.

    The parts are the signed mass, the signed null, and the sum of the two without signs; the score is (mass - null) /
    sum of the means. Each head counts with the sign that it has in the mean over the own pairs, and the lag is the one
    where the difference of mass and null is largest. Half of the examples are measured with the signs and the lag of
    the other half, and the reverse: with signs and a lag of their own, noise would score above 0.

    Args:
        reads: [N, 2, H + 1, LAGS] of `signed_reads`.
    """
    if len(reads) < 2:
        return None
    parts = np.empty((len(reads), 3))
    for half in (0, 1):
        signs, lag = _chosen(reads[1 - half :: 2])
        mass, null = ((reads[half::2, part, :-1, lag] * signs[:, lag]).mean(axis=1) for part in (0, 1))
        parts[half::2] = np.stack([mass, null, reads[half::2, :, -1, lag].sum(axis=1)], axis=1)
    return parts, _chosen(reads)[1]


def _chosen(reads: NDArray[np.floating]) -> tuple[NDArray[np.floating], int]:
    """Return the sign of each head at each lag, and the lag with the largest difference of mass and null."""
    own, other = reads[:, :, :-1].mean(axis=0)
    signs = np.sign(own)
    return signs, int(((own - other) * signs).mean(axis=0).argmax())


def ratio(parts: NDArray[np.float64]) -> tuple[float, float]:
    """Return the score of `signed_score` and its standard error over examples, to first order."""
    mass, null, both = parts.mean(axis=0)
    if both <= 0:
        return 0.0, 0.0
    score = (mass - null) / both
    slopes = (parts[:, 0] - parts[:, 1] - score * parts[:, 2]) / both
    return float(score), float(slopes.std(ddof=1) / len(parts) ** 0.5)

"""Whether a choice is right: the score of every candidate in float64, and how far rounding can move it.

Scores are computed from q and k densely, sequence by sequence, with nothing of the package. Numbers of 16 or 32 bits
are exact in float64. A choice is wrong if its true score is lower than that of another candidate by more than rounding
can explain.

How far a score can be moved by rounding, in any order of summation, with e = 2^-23, the distance of float32 numbers
(a rounded operation errs by half of that, in tensor cores, which cut off, by all of it), and |x| the norm:

- A product q.k is a sum of K terms: it errs by at most K e |q| |k|.
- exact: the factor `scale` (times log2 of e), the product with it, the distance to a maximum, and the addition of a
  logarithm to that maximum err by 6 e scale |q| |k| at most together. That makes (K + 6) e scale |q| |k|, with the
  chunk's longest key. The C terms are exponentials, each with a relative error of at most 32 e (the polynomials of the
  kernels: 2.7e-6); their sum errs by C e of itself, its scaling to new maxima by less than that, the logarithm, at most
  log2 C = 8, by 8 e. What is relative in a mass is absolute in its logarithm: (2 C + 40) e.
- approx: a mean key errs in each number by (C + 1) e of the mean of absolute values; q times it by K e |q| |mean|; a
  common factor by 2 e. |mean| is at most the norm a of the means of absolute values: (C + K + 4) e |q| a. Of keys in
  16 bits the mean may be kept in two numbers of 16 bits, which lose (e16 / 2)^2 of it, e16 being their distance.
- The scores here err alike with e = 2^-52, which is added to e: so the criterion holds for float64 too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What is asked for, under the names of the arguments of `top1_chunk_choice`: `**vars(rules)`."""

    chunk: int
    mode: str = "exact"
    remote: int = 1
    scale: float | None = None
    segments: Tensor | None = None


def assert_choice(choice: Tensor, q: Tensor, k: Tensor, rules: Rules, name: str = "the choice") -> None:
    """Raise AssertionError unless `choice` [B, T, H, remote] holds the best earlier chunks, best first.

    Chunks are counted within their sequence; -1 must stand where there are fewer, and only there.
    """
    _assert_best(choice, *_chunk_scores(q, k, rules), name)


def assert_earlier_among_equals(choice: Tensor, q: Tensor, k: Tensor, rules: Rules) -> None:
    """Raise AssertionError unless the first choice is the earliest of the best chunks, of which some are several.

    Products must be exact in float32, else equal scores may be computed in different orders.
    """
    scores, _ = _chunk_scores(q, k, rules)
    best = scores >= scores.amax(-1, keepdim=True) - 1e-11
    several = (best.sum(-1) > 1) & scores.isfinite().any(-1)
    assert several.any(), "no two chunks are equally good"
    # The maximum of truth values stands where the first of them is true.
    assert torch.equal(choice[..., 0].long()[several], best.int().argmax(-1)[several]), "a later chunk was chosen"


def assert_element_choice(choice: Tensor, q: Tensor, k: Tensor, segments: Tensor | None, name: str = "keys") -> None:
    """Raise AssertionError unless `choice` [B, T, H], positions in the row, are the keys with the best products."""
    B, T, H, K = q.shape
    wide, keys = q.double(), k.double().repeat_interleave(H // k.shape[2], dim=2)
    scores = torch.full((B, T, H, T), float("-inf"), dtype=torch.float64, device=q.device)
    for b, start, stop in _sequences(B, T, segments):
        products = torch.einsum("thk,shk->ths", wide[b, start:stop], keys[b, start:stop])
        future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        scores[b, start:stop, :, start:stop] = products.masked_fill(future[:, None], float("-inf"))
    doubt = K * _distance(q.dtype) * wide.norm(dim=-1)[..., None] * keys.norm(dim=-1).transpose(1, 2)[:, None]
    _assert_best(choice[..., None], scores, doubt, name)


def _distance(dtype: torch.dtype) -> float:
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps + torch.finfo(torch.float64).eps


def _sequences(B: int, T: int, segments: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Yield row, first token and the token after the last of each sequence."""
    for b in range(B):
        lengths = [T] if segments is None else segments[b].unique_consecutive(return_counts=True)[1].tolist()
        stop = 0
        for length in lengths:
            stop += length
            yield b, stop - length, stop


def _chunk_scores(q: Tensor, k: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the scores [B, T, H, M] of the chunks of a sequence, -inf for no candidates, and how far they may err."""
    B, T, H, _ = q.shape
    C = rules.chunk
    shape = B, T, H, max(rules.remote, T // C)
    scores = torch.full(shape, float("-inf"), dtype=torch.float64, device=q.device)
    doubt = torch.zeros_like(scores)
    for b, start, stop in _sequences(B, T, rules.segments):
        full = (stop - start) // C
        keys = k[b, start : start + full * C].repeat_interleave(H // k.shape[2], dim=1).unflatten(0, (full, C))
        score, error = _score(q[b, start:stop], keys, rules)
        own = torch.arange(stop - start, device=q.device) // C
        later = torch.arange(full, device=q.device) >= own[:, None]
        scores[b, start:stop, :, :full] = score.masked_fill(later[:, None], float("-inf"))
        doubt[b, start:stop, :, :full] = error
    return scores, doubt


def _score(q_THK: Tensor, k_MCHK: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return the scores [T, H, M] of chunks, and how far they may err."""
    _, C, _, K = k_MCHK.shape
    e = _distance(q_THK.dtype)
    lost = (torch.finfo(q_THK.dtype).eps / 2) ** 2 if q_THK.element_size() == 2 else 0.0
    q_THK, k_MCHK = q_THK.double(), k_MCHK.double()
    length_THM = q_THK.norm(dim=-1)[:, :, None]
    if rules.mode == "approx":
        score = torch.einsum("thk,mhk->thm", q_THK, k_MCHK.mean(1))
        return score, ((C + K + 4) * e + lost) * length_THM * k_MCHK.abs().mean(1).norm(dim=-1).T
    scale = K**-0.5 if rules.scale is None else rules.scale
    score = (scale * torch.einsum("thk,mchk->thmc", q_THK, k_MCHK)).logsumexp(-1)
    return score, e * ((K + 6) * scale * length_THM * k_MCHK.norm(dim=-1).amax(1).T + 2 * C + 40)


def _assert_best(choice: Tensor, scores: Tensor, doubt: Tensor, name: str) -> None:
    """Raise AssertionError unless `choice` [..., remote] are the best of `scores` [..., M], up to `doubt`."""
    choice, remote = choice.long(), choice.shape[-1]
    left = scores > float("-inf")
    there = torch.arange(remote, device=choice.device) < left.sum(-1, keepdim=True)
    assert torch.equal(choice >= 0, there), f"{name}: something is chosen without candidates, or nothing with some"
    assert (choice[~there] == -1).all(), f"{name}: no choice is not always -1"
    assert (choice < scores.shape[-1]).all(), f"{name}: a choice is out of range"
    for slot in range(remote):
        at, chosen = choice[..., slot : slot + 1].clamp(min=0), there[..., slot : slot + 1]
        assert left.gather(-1, at)[chosen].all(), f"{name}: a choice is no candidate, or there twice"
        left = left.scatter(-1, at, left.gather(-1, at) & ~chosen)
        lack = (scores - doubt).masked_fill(~left, float("-inf")).amax(-1, keepdim=True) - (scores + doubt).gather(
            -1, at
        )
        lack = torch.where(chosen, lack, float("-inf"))
        wrong = int((lack > 0).sum())
        assert not wrong, f"{name}: {wrong} of {int(chosen.sum())} differ by more than rounding, by {lack.max():.3g}"
    # Where the earlier of equals stands first. That so few are equal shows that rounding is not made too much of.
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :remote]
    differ, total = int((there & (choice != order)).sum()), int(there.sum())
    assert differ <= 2 + total // 500, f"{name}: only {total - differ} of {total} are those of float64"

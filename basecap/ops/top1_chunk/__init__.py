"""Top-1 chunk selection: attention to the own chunk and to the best earlier one (arXiv 2505.18522)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import Backend, Decision, choose, decide, once, taken, without_autocast
from basecap.ops._influence import Influence, of_heads, visible, wide
from basecap.ops._selection.checks import check_heads, check_packing
from basecap.ops._transforms import refuse_mapping, refuse_transforms
from basecap.ops.top1_chunk import operators, reference
from basecap.ops.top1_chunk.cache import top1_chunk_cache, top1_chunk_fill, top1_chunk_further, top1_chunk_step
from basecap.ops.top1_chunk.grid import check_options, chunk_grid, most_remote
from basecap.ops.top1_chunk.operators import FAMILIES

__all__ = [
    "influence",
    "top1_chunk",
    "top1_chunk_cache",
    "top1_chunk_choice",
    "top1_chunk_fill",
    "top1_chunk_further",
    "top1_chunk_step",
    "top1_chunk_weights",
]

Mode = Literal["exact", "approx"]


def top1_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int = 128,
    mode: Mode = "exact",
    scale: float | None = None,
    remote: int = 1,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend, with one softmax, to the past of the own chunk and to the best earlier chunks of the sequence.

    The keys are cut into chunks of C from the start of each sequence. A query scores every chunk before its own and
    attends to all keys of the `remote` best ones. The choice has no gradient; ties go to the earlier chunk, and a chunk
    whose score is NaN is never chosen. Source: arXiv 2505.18522, section 5 and appendix D, where `remote` is 1.

    It supports first-order derivatives by torch.autograd; transforms of torch.func (grad, vjp, jvp, vmap) raise.

    Args:
        q: queries [B, T, H, K], H a multiple of G; float16, bfloat16, float32, and float64 in plain PyTorch.
        k: keys [B, T, G, K]; the kernels take K up to 256.
        v: values [B, T, G, K].
        chunk: C, a power of two from 16 to 256.
        mode: how a chunk is scored: "exact" by logsumexp_s(scale * q.k_s) over its keys, "approx" by the first order
            of that, q.mean_s(k_s).
        scale: positive factor of the scores; 1/sqrt(K) when None.
        remote: number of chosen chunks; fewer if there are fewer earlier chunks.
        segments: int64 [B, T], non-decreasing along T; positions with one id form one independent sequence.
        cu_seqlens: int32 [S + 1], instead of `segments` for B = 1: sequence i is the tokens from cu_seqlens[i] to
            cu_seqlens[i + 1].
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        [B, T, H, K] in the dtype of q. Memory beyond inputs and output is O(T).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an invalid option or backend.

    >>> q = k = v = torch.ones(1, 40, 2, 32)
    >>> top1_chunk(q, k, v, chunk=16).shape
    torch.Size([1, 40, 2, 32])
    """
    given = (q, k, v, chunk, mode, scale, remote, backend)
    chunk, scale, remote, decision = once(("top1_chunk",), given, lambda: _decided(*given))
    check_packing(q, segments, cu_seqlens)
    refuse_transforms("top1_chunk", q, k, v)
    refuse_mapping("top1_chunk", q, k, v)
    family = taken(decision)
    if q.shape[0] == 0:
        # An empty batch; the sums are 0 and keep the gradients of k and v defined.
        return q + k.sum() + v.sum()
    layout = chunk_grid(q, chunk, segments, cu_seqlens)
    o: Tensor = operators.choose_and_attend(q, k, v, layout, (chunk, mode == "exact", scale, remote, family))
    return o


def _decided(
    q: Tensor, k: Tensor, v: Tensor, chunk: int, mode: str, scale: float | None, remote: int, backend: Backend
) -> tuple[int, float, int, Decision]:
    """Return chunk, scale, the number of chosen chunks and what runs; ConfigError for invalid arguments."""
    check_heads({"q": q, "k": k, "v": v})
    chunk, factor, remote = check_options(q, chunk, mode, scale, remote)
    some = min(remote, most_remote(q.shape[1], chunk))
    return chunk, factor, some, decide("top1_chunk", backend, FAMILIES, q, chunk)


def top1_chunk_choice(
    q: Tensor,
    k: Tensor,
    *,
    chunk: int = 128,
    mode: Mode = "exact",
    scale: float | None = None,
    remote: int = 1,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the chosen chunks, int32 [B, T, H, remote], best first: the index within the sequence, -1 for none.

    The arguments are those of `top1_chunk`, except values and cu_seqlens; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    chunk, scale, remote = check_options(q, chunk, mode, scale, remote)
    check_packing(q, segments, None)
    refuse_mapping("top1_chunk", q, k)
    family = choose("top1_chunk", backend, FAMILIES, q, chunk)
    if q.shape[0] == 0:
        return q.new_empty(*q.shape[:3], remote, dtype=torch.int32)
    grid, own = chunk_grid(q, chunk, segments, None)
    some = min(remote, most_remote(q.shape[1], chunk))
    choice = operators.choose(q.detach(), k.detach(), [grid, own], chunk, mode == "exact", scale, some, family)
    first = grid[own.long(), 2][:, None, None]
    choice = torch.where(choice >= 0, choice - first, -1)
    return F.pad(choice, (0, remote - some), value=-1).unflatten(0, q.shape[:2])


def top1_chunk_weights(
    q: Tensor,
    k: Tensor,
    *,
    chunk: int = 128,
    mode: Mode = "exact",
    scale: float | None = None,
    remote: int = 1,
    segments: Tensor | None = None,
) -> Tensor:
    """Return the attention distribution [B, H, T, T], dense and differentiable: for inspection, T x T in memory.

    The arguments are those of `top1_chunk_choice`, except the backend; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    chunk, scale, remote = check_options(q, chunk, mode, scale, remote)
    check_packing(q, segments, None)
    with without_autocast(q.device):
        return reference.weights(q, k, chunk, mode, scale, remote, segments)


def influence(
    q: Tensor,
    k: Tensor,
    *,
    chunk: int = 128,
    mode: Mode = "exact",
    scale: float | None = None,
    remote: int = 1,
    segments: Tensor | None = None,
) -> Influence:
    """Return the attention distribution of every query head, zero outside the own and the chosen chunks.

    The arguments are those of `top1_chunk_choice`, except the backend; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    q, k = wide(q, k)
    choice_BTHR = top1_chunk_choice(q, k, chunk=chunk, mode=mode, scale=scale, remote=remote, segments=segments)
    chunk, scale, _ = check_options(q, chunk, mode, scale, remote)
    B, T, H, _ = q.shape
    grid, own = chunk_grid(q, chunk, segments, None)
    own_BT = (own - grid[own.long(), 2]).view(B, T)
    past = visible(T, segments, q.device)

    def factors(heads: slice) -> Tensor:
        seen = own_BT[:, None, :, None] == own_BT[:, None, None, :]
        for choice_BTH in choice_BTHR[:, :, heads].unbind(-1):
            seen = seen | (choice_BTH.mT[..., None] == own_BT[:, None, None, :])
        scores = torch.einsum("bthk,bshk->bhts", q[:, :, heads], of_heads(k, heads, H)) * scale
        return scores.masked_fill(~(seen & past), float("-inf")).softmax(-1)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)

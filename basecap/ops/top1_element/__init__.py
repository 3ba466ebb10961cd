"""Top-1 element selection: attention whose output is the value of the best key (arXiv 2505.18522, section 4)."""

import torch
from torch import Tensor

from basecap.ops._dispatch import Backend, Decision, choose, decide, once, taken, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._selection.checks import append_rows, check_cache, check_heads, check_packing
from basecap.ops._shapes import check_scale
from basecap.ops._transforms import refuse_transforms, wants_gradients
from basecap.ops.attention import attention, full_attention
from basecap.ops.attention.fused import converts, fused_kernel, settings
from basecap.ops.top1_element import operators, reference
from basecap.ops.top1_element.operators import FAMILIES


def top1_element(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return o_t = v_s of the s <= t with the highest q_t.k_s; the earliest among equals, never one that is NaN.

    Source: arXiv 2505.18522, section 4.
    Backward is straight through: o = (onehot + P - stop_gradient(P)) v with P the softmax of scale * q.k, so dv comes
    from the choice, dq and dk from the softmax. The gradients of q and k are those of softmax attention to the values,
    and are left to PyTorch's fused attention; its GPU kernels add dq in varying order unless
    `torch.use_deterministic_algorithms` is on.

    It supports first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. `torch.func.vmap` calls it once per slice.

    Args:
        q: queries [B, T, H, K], H a multiple of G; float16, bfloat16, float32, and float64 in plain PyTorch.
        k: keys [B, T, G, K]; the kernels take K up to 256.
        v: values [B, T, G, K].
        scale: positive factor of the scores in the softmax; 1/sqrt(K) when None.
        segments: int64 [B, T], non-decreasing along T; positions with one id form one independent sequence.
        cu_seqlens: int32 [S + 1], instead of `segments` for B = 1: sequence i is the tokens from cu_seqlens[i] to
            cu_seqlens[i + 1].
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        [B, T, H, K] in the dtype of v, memory O(T).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    given = (q, k, v, scale, backend)
    scale, decision, full, number = once(("top1_element", settings()), given, lambda: _decided(*given))
    check_packing(q, segments, cu_seqlens)
    refuse_transforms("top1_element", q, k, v)
    family = taken(decision)
    if q.shape[0] == 0:
        # An empty batch; the sums are 0 and keep the gradients of k and v defined.
        return q + k.sum() + v.sum()
    if cu_seqlens is not None:
        segments = torch.searchsorted(cu_seqlens, torch.arange(q.shape[1], device=q.device), right=True)[None]
    soft = fused = None
    if wants_gradients(q, k):
        if number is None or segments is not None or converts(q):
            soft = attention(q, k, v.detach(), scale=scale, segments=segments)
        else:
            taken(full)
            fused = number, scale
    o: Tensor = operators.select(q, k, v, soft, _first(segments), family, fused)
    return o


def _decided(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: Backend
) -> tuple[float, Decision, Decision, int | None]:
    """Return the scale and what runs; of attention to one sequence too, and its kernel if it is in `fused`.

    Raises ConfigError for invalid arguments.
    """
    check_heads({"q": q, "k": k, "v": v})
    factor = check_scale(scale, q.shape[3])
    own = decide("top1_element", backend, FAMILIES, q)
    return factor, own, full_attention(q, v), fused_kernel(q, k, v.detach(), factor)


def top1_element_choice(q: Tensor, k: Tensor, *, segments: Tensor | None = None, backend: Backend = "auto") -> Tensor:
    """Return the position of the chosen key in its row, int32 [B, T, H].

    The arguments are those of `top1_element`, except values, scale and cu_seqlens; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    check_packing(q, segments, None)
    family = choose("top1_element", backend, FAMILIES, q)
    B, T = q.shape[:2]
    choice = operators.choose(q.detach().flatten(0, 1), k.detach().flatten(0, 1), _first(segments), T, family)
    row = torch.arange(B, device=q.device, dtype=torch.int32)[:, None, None] * T
    return choice.unflatten(0, (B, T)) - row


def top1_element_weights(q: Tensor, k: Tensor, *, segments: Tensor | None = None) -> Tensor:
    """Return [B, H, T, T], 1 at the chosen key of each query and 0 elsewhere: for inspection, T x T in memory.

    The arguments are those of `top1_element_choice`, except the backend; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    check_packing(q, segments, None)
    with without_autocast(q.device):
        return reference.one_hot(reference.scores(q, k, 1.0, segments))


def influence(q: Tensor, k: Tensor, *, segments: Tensor | None = None) -> Influence:
    """Return 1 at the chosen key of each query and 0 elsewhere, the factors of every query head.

    The arguments are those of `top1_element_choice`, except the backend; raises ConfigError as it does.
    """
    check_heads({"q": q, "k": k})
    q, k = wide(q, k)
    choice_BTH = top1_element_choice(q, k, segments=segments)
    B, T, H, _ = q.shape
    position = torch.arange(T, device=q.device)

    def factors(heads: slice) -> Tensor:
        return (choice_BTH[:, :, heads].mT[..., None] == position).to(q.dtype)

    return Influence(shape=(B, H, T), device=q.device, factors=factors)


@torch.no_grad()  # else the cache would keep the graphs of all its tokens
def top1_element_step(
    q: Tensor, k: Tensor, v: Tensor, cache: dict[str, Tensor], length: int, *, lengths: Tensor | None = None
) -> Tensor:
    """Append one token to the cache, in place, and return the value [B, 1, H, K] of its best key, in the cache's dtype.

    A position may be written again: with a smaller `length`, what the cache held after it makes no difference. The
    output has no gradient: train with `top1_element`.

    Args:
        q: the query [B, 1, H, K].
        k: its key [B, 1, G, K].
        v: its value [B, 1, G, K].
        cache: "k" and "v" [B, max_length, G, K].
        length: tokens already in the cache; the caller adds one after each step, and may subtract any number.
        lengths: int64 [B], such numbers of sequences that differ, none above `length`.

    Raises:
        ConfigError: a full cache, or one made for other shapes, dtypes or devices.
    """
    check_cache({"q": q, "k": k, "v": v}, cache, length, lengths=lengths)
    length = length if torch.compiler.is_compiling() else int(length)  # int() would compile code for one length
    B, _, H, K = q.shape
    position = torch.arange(length + 1, device=q.device)
    if lengths is None:
        cache["k"][:, length : length + 1] = k
        cache["v"][:, length : length + 1] = v
        own, hidden = torch.full((1, 1, 1, 1), length, device=q.device), None
    else:
        append_rows(cache, k, v, lengths)
        own = lengths[:, None, None, None]
        hidden = position > own
    G = k.shape[2]
    wide = torch.promote_types(cache["k"].dtype, torch.float32)
    q_BGRK = q[:, 0].unflatten(1, (G, H // G)).to(wide)
    with without_autocast(q.device):
        scores = torch.einsum("bgrk,bsgk->bgrs", q_BGRK, cache["k"][:, : length + 1].to(wide))
    unseen = scores.isnan() if hidden is None else scores.isnan() | hidden
    scores = scores.masked_fill(unseen, float("-inf"))
    best = scores == scores.amax(-1, keepdim=True)
    chosen = torch.where(best, position, own).amin(-1)
    row = torch.arange(B, device=q.device)[:, None, None]
    head = torch.arange(G, device=q.device)[:, None]
    return cache["v"][row, chosen, head].reshape(B, 1, H, K)


def _first(segments: Tensor | None) -> Tensor | None:
    """Return int32 [B * T], where each token's segment starts in the row of all tokens; None without segments."""
    if segments is None:
        return None
    token = torch.arange(segments.numel(), device=segments.device, dtype=torch.int32).view_as(segments)
    fresh = torch.ones_like(segments, dtype=torch.bool)
    fresh[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(fresh, token, 0).flatten().cummax(0).values.to(torch.int32)

"""Choose the tokens that a query reads; the loss that teaches an indexer to choose them (arXiv 2512.02556)."""

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose
from basecap.ops._selection.checks import check_heads
from basecap.ops._shapes import check_devices, check_floating, check_integers, check_segments, is_whole
from basecap.ops._transforms import refuse_all_transforms, wants_gradients
from basecap.ops.token_choice import operators
from basecap.ops.token_choice.eager import best, index_scores, mass
from basecap.ops.token_choice.operators import FAMILIES

__all__ = ["best", "choose_by_index", "choose_by_mass", "index_divergence", "index_scores", "mass"]


@torch.no_grad()
def choose_by_index(
    index_q_BTIJ: Tensor,
    index_k_BTJ: Tensor,
    weights_BTI: Tensor,
    top: int,
    *,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the tokens s <= t with the largest sum_i w_ti ReLU(q_ti.k_s) (arXiv 2512.02556, eqs. 1 and 2).

    Args:
        index_q_BTIJ: queries of the indexer's I heads.
        index_k_BTJ: its keys, one for each token.
        weights_BTI: weights of its heads.
        top: tokens of each query, fewer where it sees fewer; of equal scores the latest.
        segments: int64 [B, T], see `Mixer.forward`.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        bool [B, T, T], whether query t reads token s. It has no gradient.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, an invalid `top`, or a backend that cannot run.
    """
    _check_index(index_q_BTIJ, index_k_BTJ, weights_BTI)
    top = _check_top(top)
    _check_packing(index_q_BTIJ, segments)
    family = choose("choose_by_index", backend, FAMILIES, index_q_BTIJ)
    index = (x.detach() for x in (index_q_BTIJ, index_k_BTJ, weights_BTI))
    chosen_BTT: Tensor = operators.choose_by_index(*index, segments, top, family)
    return chosen_BTT


@torch.no_grad()
def choose_by_mass(
    q_BTHK: Tensor, k_BTGK: Tensor, top: int, *, segments: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return the tokens s <= t with the largest mean over the heads of softmax_s(q_t.k_s / sqrt(K)).

    Args:
        q_BTHK: queries of attention, H a multiple of G.
        k_BTGK: its keys.
        top: see `choose_by_index`, as are the other arguments and the result.
        segments: int64 [B, T].
        backend: "auto", "eager" or "triton".

    Raises:
        ConfigError: as `choose_by_index` does.
    """
    check_heads({"q": q_BTHK, "k": k_BTGK})
    top = _check_top(top)
    _check_packing(q_BTHK, segments)
    family = choose("choose_by_mass", backend, FAMILIES, q_BTHK)
    chosen_BTT: Tensor = operators.choose_by_mass(q_BTHK.detach(), k_BTGK.detach(), segments, top, family)
    return chosen_BTT


def index_divergence(
    index_q_BTIJ: Tensor,
    index_k_BTJ: Tensor,
    weights_BTI: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    *,
    chosen_BTT: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the mean over queries of KL(mass || softmax of index scores) (arXiv 2512.02556, eqs. 3 and 4).

    The mass is the mean over the heads of attention's distribution over what a query sees, or over what it has chosen.
    Only the indexer's tensors get a gradient, which is computed together with the loss.

    It supports first-order derivatives by torch.autograd; transforms of torch.func (grad, vjp, jvp, vmap), forward mode
    and second derivatives raise an error.

    Args:
        index_q_BTIJ: see `choose_by_index`.
        index_k_BTJ: see there.
        weights_BTI: see there.
        q_BTHK: see `choose_by_mass`.
        k_BTGK: see there.
        chosen_BTT: bool, the tokens that the loss is over, visible ones, at least one for each query; all visible ones
            when None.
        segments: int64 [B, T], see `Mixer.forward`.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        A number in float32 or wider.

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or a backend that cannot run.
    """
    index = (index_q_BTIJ, index_k_BTJ, weights_BTI)
    _check_index(*index)
    check_heads({"q": q_BTHK, "k": k_BTGK})
    B, T = index_q_BTIJ.shape[:2]
    if q_BTHK.shape[:2] != (B, T):
        raise ConfigError(f"q {list(q_BTHK.shape)} must be [B, T, H, K] with B, T = {[B, T]}, those of index_q.")
    _check_packing(index_q_BTIJ, segments)
    if chosen_BTT is not None:
        check_integers("chosen", chosen_BTT)
        if chosen_BTT.dtype != torch.bool or chosen_BTT.shape != (B, T, T):
            raise ConfigError(f"chosen {list(chosen_BTT.shape)}, {chosen_BTT.dtype}, must be bool {[B, T, T]}.")
    check_devices({"index_q": index_q_BTIJ, "q": q_BTHK, "chosen": chosen_BTT})
    refuse_all_transforms("index_divergence", *index)
    family = choose("index_divergence", backend, FAMILIES, index_q_BTIJ, q_BTHK)
    heads, learn = [q_BTHK.detach(), k_BTGK.detach()], wants_gradients(*index)
    loss: Tensor = operators.diverge(*index, heads, chosen_BTT, segments, learn, family)[0]
    return loss


def _check_index(q: Tensor, k: Tensor, weights: Tensor) -> None:
    given = {"index_q": q, "index_k": k, "weights": weights}
    check_floating(given)
    if q.dim() != 4 or 0 in q.shape[1:]:
        raise ConfigError(f"index_q {list(q.shape)} must be [B, T, I, J] with all but B at least 1.")
    B, T, heads, J = q.shape
    if k.shape != (B, T, J) or k.dtype != q.dtype:
        raise ConfigError(f"index_k {list(k.shape)}, {k.dtype}, must be {[B, T, J]}, {q.dtype}, for this index_q.")
    if weights.shape != (B, T, heads):
        raise ConfigError(f"weights {list(weights.shape)} must be [B, T, I] = {[B, T, heads]}.")
    check_devices(given)


def _check_packing(q: Tensor, segments: Tensor | None) -> None:
    check_segments(segments, q.shape[:2])
    check_devices({"q": q, "segments": segments})


def _check_top(top: int) -> int:
    if not is_whole(top) or top < 1:
        raise ConfigError(f"top must be an integer of at least 1, not {top!r}.")
    return int(top)

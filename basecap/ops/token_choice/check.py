"""The cases of the indexer's loss: over visible tokens, and over those that the indexer chooses."""

from functools import partial

from torch import Tensor

from basecap.ops._dispatch import Backend
from basecap.ops._selection.draws import with_exact_scores
from basecap.ops.cases import B, Case, Draw, H, K, by_backend
from basecap.ops.token_choice import FAMILIES, choose_by_index, index_divergence, reference

FUNCTIONS = ("choose_by_index", "choose_by_mass", "divergence")
#: Tokens chosen.
TOP = 24


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    # Weights are multiples of 1/8, too.
    q, k, weights = with_exact_scores(draw(B, T, 2 * H, K), draw(B, T, 1, K), draw(B, T, 2 * H)).values()
    return {"index_q": q, "index_k": k[:, :, 0], "weights": (8 * weights).round() / 8}


def _loss(index_q: Tensor, index_k: Tensor, weights: Tensor, *, chosen: bool, backend: Backend) -> Tensor:
    """Return the loss of an indexer whose queries, and keys but for their sign, are those of attention, too."""
    index = index_q, index_k, weights
    keys = -index_k.unsqueeze(2) if isinstance(index_k, Tensor) else index_k
    read = choose_by_index(*index, TOP, backend=backend) if chosen else None
    return index_divergence(*index, index_q, keys, chosen_BTT=read, backend=backend)


def _definition(index_q: Tensor, index_k: Tensor, weights: Tensor, *, chosen: bool) -> Tensor:
    index, seen = (index_q, index_k, weights), reference.seen(index_k)
    if chosen:
        seen = reference.chosen(reference.index_scores(*index), seen, TOP)
    return reference.divergence(*index, index_q, -index_k[:, :, None], seen)


def _case(chosen: bool) -> Case:
    return by_backend(partial(_loss, chosen=chosen), partial(_definition, chosen=chosen), _inputs, FAMILIES)


CASES = {"indexer's loss": _case(False), "indexer's loss, chosen tokens": _case(True)}

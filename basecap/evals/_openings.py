"""The first tokens of held-out documents, and the losses on them."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from basecap.data import PreparedData
from basecap.data.sources import Split
from basecap.evals._contract import Context
from basecap.evals._passes import token_losses
from basecap.models.language_model import LanguageModel


def openings(data: PreparedData, split: Split, domain: str, length: int, most: int) -> np.ndarray:
    """Return the first tokens of a domain's first documents that are long enough: int64 [at most `most`, length]."""
    documents = data.documents(split, domain)
    long_enough = np.flatnonzero(documents.sizes >= length)[:most]
    rows = [documents.tokens(int(index))[:length].astype(np.int64) for index in long_enough]
    return np.stack(rows) if rows else np.empty((0, length), np.int64)


def losses_of(
    model: LanguageModel, context: Context[PreparedData], rows: np.ndarray, tokens_per_batch: int
) -> np.ndarray:
    """Return the loss of each token, predicted from those before it: float64 [N, T], as the int64 `rows`."""
    start = np.full((len(rows), 1), context.data.tokenizer.end_of_text, np.int64)
    inputs = torch.from_numpy(np.concatenate([start, rows[:, :-1]], axis=1))
    targets, size, found = torch.from_numpy(rows), max(1, tokens_per_batch // rows.shape[1]), []
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        found.append(token_losses(model, context, inputs[part], targets[part], tokens_per_batch))
    return torch.cat(found).cpu().numpy()


def losses_of_each(
    model: LanguageModel, context: Context[PreparedData], parts: Sequence[np.ndarray], tokens_per_batch: int
) -> list[np.ndarray]:
    """Return `losses_of` of arrays of one length; a compiled model reads them together, as its passes are full."""
    if not model.compiled or not parts:
        return [losses_of(model, context, rows, tokens_per_batch) for rows in parts]
    ends = np.cumsum([len(rows) for rows in parts])[:-1]
    return np.split(losses_of(model, context, np.concatenate(parts), tokens_per_batch), ends)


def largest_batch(held: Iterable[np.ndarray], tokens_per_batch: int) -> np.ndarray:
    """Return zeros of the shape of the largest batch of `losses_of` for any of these rows, int64 [N, length]."""
    rows = max(held, key=len)
    return np.zeros_like(rows[: max(1, tokens_per_batch // rows.shape[1])])

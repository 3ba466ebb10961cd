"""The loss of a bigram model. Below it, a model uses more than the previous token, so its sequence mixer matters."""

import numpy as np

from basecap.data.prepared import PreparedData

#: Maximum number of training tokens to count.
TOKENS = 4_000_000


def bigram_loss(data: PreparedData, seq_len: int) -> float:
    """Return the loss, in nats per token, of a bigram model on the test documents of the training domains.

    Pairs are counted at the start of the training stream and smoothed with unigrams (Witten and Bell 1991):
    p(b | a) = (count(a b) + followers(a) p(b)) / (count(a) + followers(a)), followers(a) = distinct tokens after a.

    Args:
        data: the text that the models train and are tested on.
        seq_len: tokens per row of the stream, at most the length of the training text.
    """
    size = data.tokenizer.vocab_size
    rows = max(1, min(TOKENS, data.train.tokens) // seq_len)
    counted = data.train.opening(rows, seq_len)
    pairs, counts = np.unique(counted[:, :-1] * size + counted[:, 1:], return_counts=True)
    followers = np.bincount(pairs // size, minlength=size)
    total = np.bincount(pairs // size, weights=counts, minlength=size)
    unigram = (np.bincount(counted[:, 1:].ravel(), minlength=size) + 1) / (counted[:, 1:].size + size)

    nats, predicted = 0.0, 0
    for domain in data.train_domains:
        documents = data.documents("test", domain)
        for index in range(len(documents)):
            tokens = np.concatenate([[data.tokenizer.end_of_text], documents.tokens(index)])
            before, after = tokens[:-1], tokens[1:]
            at = np.searchsorted(pairs, before * size + after).clip(max=len(pairs) - 1)
            seen = np.where(pairs[at] == before * size + after, counts[at], 0)
            weight = np.maximum(followers[before], 1)  # a token without known followers falls back to the unigram
            probability = (seen + weight * unigram[after]) / (total[before] + weight)
            nats -= np.log(probability).sum()
            predicted += len(after)
    return float(nats / predicted)

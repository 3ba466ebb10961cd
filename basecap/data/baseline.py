"""What a model reaches that looks at the previous token alone: below it, a sequence mixer has begun to matter."""

import numpy as np

from basecap.data.prepared import PreparedData

#: Training tokens that are counted at most.
TOKENS = 4_000_000


def bigram_loss(data: PreparedData, seq_len: int) -> float:
    """Return the loss, in nats per token, of a bigram model on the test documents of the training domains.

    Pairs are counted in the beginning of the training stream and smoothed by their unigrams (Witten and Bell 1991):
    p(b | a) = (count(a b) + followers(a) p(b)) / (count(a) + followers(a)), followers(a) = distinct tokens after a.

    Args:
        data: what the models train and are tested on.
        seq_len: tokens per row of the stream; at most the training text, as for the models.
    """
    size = data.tokenizer.vocab_size
    rows = max(1, min(TOKENS, data.train.tokens) // seq_len)
    counted = data.train.batch(0, 0, rows, seq_len).numpy()
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
            weight = np.maximum(followers[before], 1)  # a token never seen before another falls back to the unigram
            probability = (seen + weight * unigram[after]) / (total[before] + weight)
            nats -= np.log(probability).sum()
            predicted += len(after)
    return float(nats / predicted)

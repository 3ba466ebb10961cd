"""Classes of tokens by what a copy from the context would say, and the names of their numbers in `domain-loss`.

The n tokens before a token are its n-gram. A class has, by domain and evaluation point, a `Record` of `domain-loss`
whose metric is `loss_metric` of the class: `value` is its mean loss in nats per token, `n` its number of tokens. The
classes partition the tokens of a domain, so the means, weighted by `n`, add up to the metric "loss".
"""

#: The n-gram occurs earlier in the window of the model, and was followed by this token there at least once.
COPIED = "copied"
#: The n-gram occurs earlier in the window, and was always followed by other tokens: a copy would be wrong.
MISLED = "misled"
#: The n-gram does not occur earlier in the window.
NEW = "new"
CLASSES = (COPIED, MISLED, NEW)


def loss_metric(name: str) -> str:
    """Return the metric of the mean loss of a class.

    >>> loss_metric(COPIED)
    'copied_loss'
    """
    return f"{name}_loss"

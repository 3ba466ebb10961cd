"""Looking at a study more than once: how the probability of a wrong verdict is spent over the looks.

Each look at a growing study is another chance to be wrong. Of the whole level a look may use what a spending function
(Kim and DeMets, Biometrika 74, 1987: level * share^2, the share of the seeds that the study may have in the end) has
grown by since the look before. The levels of all looks add up to the whole, so that what any of them says is wrong
with at most that probability, however the looks depend on each other.
"""

from collections.abc import Sequence

POWER = 2


def level_of_last_look(looks: Sequence[int], most: int, level: float) -> float:
    """Return the level at which the intervals of the last look are made.

    Args:
        looks: seeds of the study at each look, ascending.
        most: seeds that it may have in the end.
        level: probability of a wrong interval over all looks.

    >>> level_of_last_look([2, 4], 4, 0.05)
    0.0375
    """
    shares = [min(1.0, seeds / most) for seeds in looks]
    before = shares[-2] if len(shares) > 1 else 0.0
    return level * (shares[-1] ** POWER - before**POWER)


def next_look(seeds: int, most: int) -> int:
    """Return the seeds of the look after one with `seeds`: half as many again, at least one more, at most `most`."""
    return min(most, seeds + max(1, seeds // 2))

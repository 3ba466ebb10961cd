"""Standard errors of what evaluations measure."""

import numpy as np


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of independent values [N], None for fewer than two."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def answers_error(share: float, count: int) -> float:
    """Return the standard error of a share of right answers, as if two more were right and two more wrong.

    So it is not zero where no answer is right (Agresti and Coull, The American Statistician 52, 1998).
    """
    count += 4
    shrunk = (share * (count - 4) + 2) / count
    return float((shrunk * (1 - shrunk) / count) ** 0.5)

"""Standard errors of what evaluations measure."""

import numpy as np


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of independent values [N], None for fewer than two."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None

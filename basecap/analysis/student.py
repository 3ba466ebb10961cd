"""Quantiles of Student's t distribution."""


def student_quantile(freedom: float, probability: float) -> float:
    """Return the quantile of Student's t distribution with so many degrees of freedom.

    >>> round(student_quantile(4, 0.975), 3)
    2.776
    """
    from scipy.special import stdtrit  # its import takes a fifth of the time of a report, and most reports need none

    return float(stdtrit(freedom, probability))

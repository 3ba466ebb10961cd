"""The learning rate as a function of the step."""

import math
from typing import Literal


def warmup_steps(asked: int, steps: int) -> int:
    """Return the warm-up steps of a run of `steps` steps: `asked`, but at most a tenth of the run."""
    return min(asked, steps // 10)


def learning_rate(
    step: int,
    steps: int,
    *,
    peak: float,
    final: float,
    warmup: int,
    schedule: Literal["linear", "cosine", "constant", "wsd"],
) -> float:
    """Return the rate of update `step` (from 0) of `steps`: linear warm-up to `peak`, then decay to `final * peak`.

    A warm-up longer than a tenth of the run is shortened to that, so that short runs train too.
    """
    warmup = warmup_steps(warmup, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule in ("constant", "wsd"):  # branches of wsd decay, see `basecap.train.config.Branch`
        return peak
    left = 1 - (step - warmup) / max(1, steps - warmup)
    share = left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return peak * (final + (1 - final) * share)

"""Keys of a study that had another place in earlier versions, and studies that had other names."""

import functools
import logging
from typing import Any

from basecap.errors import ConfigError

#: Warnings about keys of earlier versions.
MOVED_SEEDS = "train.seeds is now seeds, at the top level of a study; the old key still works"
DROPPED_TOLERANCE = "gap.tolerance (nats) is no longer used; set gap.cost, a share of the reference's tokens"

#: Built-in studies that were renamed when those of a second paper were added.
RENAMED = {
    **{f"figure-{name}": f"bc-figure-{name}" for name in ("1b", "3a", "3b", "3c", "3d", "3e", "7")},
    "figure-1a": "bc-figure-1a, and with top1-element bc-figure-8",
    "figure-2a": "bc-figure-2a, and with top1-element bc-figure-9",
    "figure-2b": "bc-figure-2b, and with the Top-1 architectures bc-figure-6b",
    "figure-3f": "bc-figure-3f, and with the entropies bc-figure-4",
    "limited-110m": "bc-figure-6a",
}


def with_moved_keys(study: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a study with keys of earlier versions moved to their current place; logs a warning for each.

    Raises:
        ConfigError: a key is set at both places.
    """
    train, gap = study.get("train"), study.get("gap")
    if isinstance(train, dict) and "seeds" in train:
        if "seeds" in study:
            raise ConfigError(f"{where}: seeds and train.seeds are the same key; remove train.seeds.")
        log_move(where, MOVED_SEEDS)
        study = {**study, "train": {key: value for key, value in train.items() if key != "seeds"}}
        study["seeds"] = train["seeds"]
    if isinstance(gap, dict) and "tolerance" in gap:
        log_move(where, DROPPED_TOLERANCE)
        study = {**study, "gap": {key: value for key, value in gap.items() if key != "tolerance"}}
    return study


@functools.cache  # a command reads a study file several times
def log_move(where: str, what: str) -> None:
    """Warn once that the file or option `where` uses a key of an earlier version; `what` says what replaced it."""
    logging.getLogger("basecap").warning("%s: %s.", where, what)

"""Architectures with a trained model that leaks, or may: they get no verdict, and no row may depend on their losses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from basecap.analysis.results import IN_PART, RunRow
from basecap.analysis.rows import LeftOut, Row
from basecap.analysis.text.comparison import Comparison, compare_runs
from basecap.analysis.text.draws import Runs
from basecap.analysis.text.measured import Setting
from basecap.analysis.text.reasons import REFERENCE

#: Seed of the draws: the same records give the same results.
DRAW_SEED = 2025

#: What RunRow says of a run that does not leak.
SOUND = (None, "passed", "not run")


def leaks_of(runs: Sequence[RunRow]) -> dict[str, dict[int, str]]:
    """Return what leaks, or is not proved, by architecture and seed: one such run is enough to doubt all others."""
    found: dict[str, dict[int, str]] = {}
    for run in runs:
        if run.leak_test not in SOUND and not str(run.leak_test).startswith(IN_PART):
            found.setdefault(run.name, {})[run.seed] = str(run.leak_test)
    return found


def compare_sound(
    names: Sequence[str], runs: Runs, setting: Setting, leaking: Mapping[str, Mapping[int, str]]
) -> Comparison:
    """Compare the architectures `names` with the reference, but those that leak, which get no verdict.

    A reference that leaks leaves all of them without one.
    """
    sound = {key: found for key, found in runs.items() if key[0] not in leaking}
    generator = np.random.default_rng(DRAW_SEED)
    compared = compare_runs([name for name in names if name not in leaking], sound, setting, generator)
    rows = {row.name: row for row in compared.rows}
    rows |= {name: _row(name, "it", leaking[name]) for name in names if name in leaking}
    if setting.reference in leaking:
        rows = {name: _row(name, REFERENCE, leaking[setting.reference]) for name in names}
    return replace(compared, rows=[rows[name] for name in names])


def _row(name: str, who: str, leaks: Mapping[int, str]) -> Row:
    seed, reason = next(iter(leaks.items()))
    own = [LeftOut(seed=seed, why=reason) for seed, reason in leaks.items()] if who == "it" else []
    words = f"{who} {reason} (leak test, seed {seed})"
    return Row(name=name, verdict="none", words=words, seeds=[], reference_seeds=[], left_out=own)

"""Runs that several commands on one study train: each run is trained by one of them, the others wait for it."""

import time
from collections.abc import Callable, Iterable, Sequence

from basecap.plan.runs import RunSpec
from basecap.records import RunInfo
from basecap.run.jobs import Runtime

#: Seconds between two looks at the runs that other commands train.
PAUSE = 1.0

#: Trains runs and yields each of them with its info, None where another command trains it now.
Pass = Callable[[Sequence[RunSpec]], Iterable[tuple[RunSpec, RunInfo | None]]]


def train_shared(runs: Sequence[RunSpec], train: Pass, runtime: Runtime) -> list[RunInfo]:
    """Train runs, those last that other commands train now; return each run's info in the order of `runs`.

    A run of another command that failed is tried again.
    """
    infos: dict[str, RunInfo] = {}
    left, told = list(runs), False
    while left:
        infos |= {run.label: info for run, info in train(left) if info is not None}
        left = [run for run in left if run.label not in infos]
        if left and not told:
            if runtime.group.is_leader:
                labels = ", ".join(run.label for run in left)
                runtime.log(f"waiting for another command that trains {labels}.")
            told = True
        while left and _all_claimed(left, runtime):
            time.sleep(PAUSE)
    return [infos[run.label] for run in runs]


def _all_claimed(runs: Sequence[RunSpec], runtime: Runtime) -> bool:
    """Whether other commands train all these runs now."""
    found = [runtime.run_records(run) for run in runs]
    return runtime.group.run_on_leader(lambda: all(runtime.records.is_claimed(records) for records in found))

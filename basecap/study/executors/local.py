"""Runs in this process, one after the other; under `torchrun` all processes train each run together."""

from collections.abc import Iterator, Sequence
from typing import Any

from basecap.study.plan import RunSpec
from basecap.study.training_job import Runtime, train_run
from basecap.study.trial import Failure, try_run
from basecap.train.interruption import deferred


class SequentialExecutor:
    """Tries and trains runs in this process."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Failure | None]]:
        """Try runs; see `basecap.study.trial`."""
        for run in runs:
            yield run, try_run(run, self.runtime)

    def train(self, runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
        """Return each run's info; raises Interrupted when a signal came, after a checkpoint."""
        infos = []
        for run in runs:
            with deferred():  # a signal waits for a checkpoint, or for the record that the run is finished
                infos.append(train_run(run, self.runtime))
        return infos

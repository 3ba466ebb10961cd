"""Trains runs in this process, one after the other; under `torchrun` all processes train each run together."""

from collections.abc import Sequence
from typing import Any

from basecap.study.plan import RunSpec
from basecap.study.run import Runtime, train_run
from basecap.train.interruption import deferred


def train_sequentially(runs: Sequence[RunSpec], runtime: Runtime) -> list[dict[str, Any]]:
    """Return each run's info; raises Interrupted when a signal came, after a checkpoint."""
    infos = []
    for run in runs:
        with deferred():  # a signal waits for a checkpoint, or for the record that the run is finished
            infos.append(train_run(run, runtime))
    return infos

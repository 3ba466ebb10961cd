"""Executor `in-process`: jobs run in this process one after the other, under `torchrun` in all of them together."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from basecap.plan.runs import RunSpec
from basecap.records import RunInfo
from basecap.run.evaluation_job import StoredPoint, evaluate_point
from basecap.run.executors._contract import Executor, executor
from basecap.run.jobs import Execution, JobFailure, Runtime, Trial, free_memory
from basecap.run.shared_work import train_shared
from basecap.run.training_job import train_run
from basecap.run.trial import try_run
from basecap.train.interruption import deferred, expendable


@executor("in-process")
class InProcessExecutor(Executor):
    """Does jobs in this process, or in all processes of its group together."""

    def __init__(self, execution: Execution, runtime: Runtime, devices: Sequence[str]):
        """Take what jobs use in this process; they run on its device, whatever `devices` are."""
        self.runtime = runtime

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Do nothing, as this executor starts no processes."""

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Trial]]:
        """Try runs, see `basecap.run.trial`."""
        for run in runs:
            with expendable():
                trial = try_run(run, self.runtime)
            yield run, trial

    def train(self, runs: Sequence[RunSpec]) -> list[RunInfo]:
        """Return each run's info; raises Interrupted when a signal came, after a checkpoint."""
        return train_shared(runs, self._train, self.runtime)

    def _train(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, RunInfo | None]]:
        for run in runs:
            with deferred():  # a signal waits for a checkpoint, or for the record that the run is finished
                info = train_run(run, self.runtime)
            free_memory(self.runtime.device)
            yield run, info

    def evaluate(
        self, points: Sequence[StoredPoint], show: Callable[[str], None]
    ) -> Iterator[tuple[StoredPoint, Mapping[str, JobFailure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        for point in points:
            with expendable():  # what is recorded stays
                failures = evaluate_point(point, self.runtime, show)
            yield point, failures

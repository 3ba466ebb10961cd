"""What a run writes while it trains: one job after the other, in one thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from basecap.train.distributed import Processes


class BackgroundWriter:
    """One thread of each process that trains a model. An error of a job is raised where the job is waited for."""

    def __init__(self, group: Processes):
        """Take the processes, which call `start` and `wait` together."""
        self._group = group
        self._pool = ThreadPoolExecutor(1)
        self._jobs: list[Future[None]] = []

    def start(self, job: Callable[[], None]) -> None:
        """Do a job after the earlier ones."""
        self._jobs.append(self._pool.submit(job))

    @property
    def failed(self) -> bool:
        """Whether a job of this process has failed; does not wait."""
        return any(job.done() and job.exception() is not None for job in self._jobs)

    def wait(self) -> None:
        """Wait for the jobs; raises what one of them raised, with several processes SharedError in all of them."""
        if self._jobs:
            self._group.run_on_all(self._raise_failure)

    def failure(self) -> BaseException | None:
        """Wait for the jobs of this process; return what the first of those that failed raised."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        return next((error for job in jobs if (error := job.exception()) is not None), None)

    def _raise_failure(self) -> None:
        error = self.failure()
        if error is not None:
            raise error

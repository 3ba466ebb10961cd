"""A trace of chosen training steps by torch's profiler, which Perfetto (https://ui.perfetto.dev) opens."""

import contextlib
import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

#: Maximum number of steps of a trace, and of bytes before it is compressed: a page of a browser holds no more.
MOST_STEPS, MOST_BYTES = 16, 1 << 29


class StepProfile:
    """Traces the steps `first` to `last` of a run, both included, into `directory`/steps-FIRST-LAST.json.gz.

    Times in a trace are longer than without it. A run that is interrupted between them writes what it has. One that is
    resumed after `first` is not traced, which is logged.
    """

    def __init__(self, steps: tuple[int, int], directory: Path, device: torch.device, log: Callable[[str], None]):
        """Take the steps, counted from 1, where the trace is written, the model's device, and what takes sentences."""
        self.first, self.last = steps
        self._path = directory / f"steps-{self.first}-{self.last}.json"
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._log = log
        self._running: profile | None = None
        self._began = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enter a step: the first one starts the trace, the last one writes it."""
        if not self._began and number > self.first:
            self._log(f"steps {self.first} to {self.last} are not traced, as the run resumes with step {number}.")
        if not self._began and number == self.first:
            self._running = profile(activities=self._activities, acc_events=True)
            self._running.start()
        self._began = self._began or number >= self.first
        if self._running is None:
            yield
            return
        with torch.profiler.record_function(f"training step {number}"):
            yield
        if number == self.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if one is running; what prevents that is logged, and the run goes on."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        try:
            self._write(running)
        except (OSError, RuntimeError) as error:
            self._log(f"the trace of steps {self.first} to {self.last} could not be written ({error}).")
        finally:
            self._path.unlink(missing_ok=True)

    def _write(self, running: profile) -> None:
        self._path.parent.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self._path))
        size = self._path.stat().st_size
        if size > MOST_BYTES:
            megabytes = f"{size >> 20:,} MiB, more than {MOST_BYTES >> 20}"
            self._log(f"the trace of steps {self.first} to {self.last} has {megabytes}, and is left out; trace fewer.")
            return
        packed = self._path.with_name(f"{self._path.name}.gz")
        with self._path.open("rb") as trace, gzip.open(packed, "wb", compresslevel=6) as file:
            shutil.copyfileobj(trace, file)
        self._log(f"steps {self.first} to {self.last} are traced in {packed}; https://ui.perfetto.dev opens it.")

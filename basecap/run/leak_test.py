"""The leak test of a trained model. A new process that it needs starts before the end, as its imports take seconds."""

import math
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from basecap.evals import Context
from basecap.evals.domain_loss import DomainLoss
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import RunSpec
from basecap.records import RunRecords
from basecap.run.jobs import Runtime
from basecap.run.provenance import loaded_plugins
from basecap.system.progress import phase
from basecap.testing.check_model import built_in
from basecap.testing.fresh_process import FreshProcess, StoredModel
from basecap.testing.trained_model import find_leaks
from basecap.train.checkpoint import latest
from basecap.train.wall_time import WallTime

#: Seconds of training from which a run of a built-in architecture is tested in a new process, which takes seconds.
LONG = 60.0
#: Seconds before the end of training at which the new process starts: it imports PyTorch with its compiler.
AHEAD = 30.0


class FinalLeakTest:
    """The leak test of one run, within a context that the run trains in; none in a study of tasks.

    The test suite compares processes for every architecture that is built in. What a plugin file keeps outside the
    model depends on what its process has read, so each of its runs is tested, not one of each architecture.
    """

    def __init__(self, run: RunSpec, runtime: Runtime, wall: WallTime):
        """Take the run, and the clock of its process."""
        self._run, self._runtime, self._wall = run, runtime, wall
        found = next((found for found in runtime.evaluations if isinstance(found, DomainLoss)), None)
        self._evaluation = found if run.task is None and runtime.group.is_leader else None
        self._built_in = built_in(run.model)
        self._process: FreshProcess | None = None
        self._before: tuple[int, float] | None = None
        self._held = ExitStack()

    def __enter__(self) -> "FinalLeakTest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the new process."""
        self._held.__exit__(kind, error, trace)

    def prepare(self, tokens: int) -> None:
        """Start the new process, if the run needs one, at the evaluation point of `tokens` if the end is near.

        That is so at the last point but one, and where the pace since the point before says `AHEAD` seconds or less.
        """
        points, seconds = self._run.timetable.tokens, self._wall.seconds({})["all"]
        left = math.inf
        if self._before is not None and tokens > self._before[0]:
            left = (seconds - self._before[1]) * (points[-1] - tokens) / (tokens - self._before[0])
        self._before = tokens, seconds
        if tokens >= points[-2:][0] or left <= AHEAD:
            self._start()

    def _start(self) -> None:
        worthwhile = not self._built_in or self._wall.seconds({})["all"] >= LONG
        if self._process is None and self._evaluation is not None and worthwhile:
            self._process = self._held.enter_context(FreshProcess())

    def record(self, model: LanguageModel, context: Context, records: RunRecords) -> dict[str, Any]:
        """Test the trained model, whose last checkpoint is on the disk; return the entry of run.json, or {}."""
        if self._evaluation is None:
            return {}
        run, runtime = self._run, self._runtime
        self._start()
        weights = latest(records.resume)
        elsewhere = None
        if self._process is not None and weights is not None:
            elsewhere = self._process, StoredModel(weights=weights, plugins=loaded_plugins(run.model))
        seed, whole, plain = int(run.hash, 16), not self._built_in, replace(context, replays=None)
        with phase(f"{run.label}: leak test"):
            found = find_leaks(model.eval(), self._evaluation, plain, seed, whole=whole, elsewhere=elsewhere)
        if found.leaks:
            runtime.log(f"{run.label} {found.leaks}; it gets no verdict.")
        elif found.untested:
            trusted = not whole or run.architecture in runtime.records.environment().get("allowed_unproved", [])
            verdict = "it gets no verdict, unless the same command runs again with --allow-unproved"
            why = f"{run.label}: the leak test is not complete ({'; '.join(found.untested)})"
            runtime.log(f"{why}." if trusted else f"{why}; {verdict}.")
        return found.record()

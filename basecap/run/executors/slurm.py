"""Executor `slurm`: jobs run as arrays of Slurm jobs, each on one node, with the records in a directory that all see.

The first job tries the architectures, which also shows that nodes see the directory, plugins and text. Then an array
trains the runs, as many side by side in a job as `local` would have on its GPUs, and what evaluations lack afterwards
is an array too. The command only submits, waits and reads the records. It may end at any time: the same command finds
its jobs by their names in the queue, and submits what is in none of them. A job that Slurm ends early, for its time
limit or with its node, goes back into the queue and resumes.

With `prepare=N` among the settings, an array of N jobs prepares the text together before all that.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basecap.data import find_prepared
from basecap.errors import ConfigError
from basecap.plan.runs import RunSpec
from basecap.plan.workloads import cache_of
from basecap.records import RunInfo
from basecap.run.evaluation_job import StoredPoint
from basecap.run.executors import _slurm_commands as slurm
from basecap.run.executors._contract import Executor, executor
from basecap.run.executors._slurm_batch import SlurmBatch, point_item, run_item, unseen
from basecap.run.jobs import Execution, JobFailure, Runtime, Trial
from basecap.run.provenance import starting_info
from basecap.run.resources import Resources
from basecap.run.sharing import MOST
from basecap.system.files import read_json, real_path, write_json
from basecap.system.progress import progress

#: The options of sbatch that Slurm took last, below the directory of a study.
SETTINGS = Path("slurm", "settings.json")
#: Seconds between two looks at the queue: the first ones, and at most.
PAUSE, LONGEST_PAUSE = 0.5, 15.0
#: Seconds after which a file that a node wrote is missing: network disks show it late.
GRACE = 90.0


@dataclass(frozen=True)
class _Place:
    """A task of a batch."""

    batch: SlurmBatch
    index: int

    @property
    def name(self) -> tuple[str, int]:
        return self.batch.path.name, self.index


def _refuse(on: Resources) -> None:
    """Raise ConfigError where an option of sbatch does not fit, or this machine has no Slurm."""
    slurm.check_settings(on.settings)
    slurm.refuse_missing()


def _settings(execution: Execution) -> dict[str, str]:
    """Return the settings that were given, else those of the last command in this directory."""
    held = read_json(real_path(execution.out) / SETTINGS) or {"settings": {}}
    return dict(execution.on.settings or held["settings"])


class _Arrays:
    """Submits arrays of jobs for a study and waits for them."""

    def __init__(self, execution: Execution, log: Callable[[str], None], *also: Path):
        """Take what the jobs share, and paths that they need; raises ConfigError where one is missing."""
        self.execution, self.log = execution, log
        self.out, self.settings = real_path(execution.out), _settings(execution)
        data = execution.study.data
        text = [] if data is None or not data.path else [Path(data.path)]
        needed = [self.out, Path(sys.executable), Path(__file__), *execution.plugins, *text, *also]
        self.needed = [path.absolute() for path in needed]
        for path in self.needed:
            if not path.exists():
                raise ConfigError(f"{path} does not exist; jobs of Slurm need it.")
        #: The arrays that this command waits for, as Slurm numbers them.
        self._arrays: dict[str, str] = {}
        #: When an answer was first missed.
        self._missing: dict[_Place, float] = {}

    def say_left(self) -> None:
        """Say which jobs go on when this command ends."""
        if self._arrays:
            ids = " ".join(self._arrays.values())
            self.log(f"Slurm jobs {ids} go on; run the same command again to wait for them, or `scancel {ids}`.")

    def _do(
        self, kind: str, items: Sequence[dict[str, Any]], width: int, enough: int | None = None
    ) -> dict[str, tuple[Any, str | None]]:
        """Have items done by jobs; return by key the answer of each, and why there is none where its job was lost.

        With `enough` answers the jobs of the other items are cancelled, and those items are left out.

        Raises ConfigError where Slurm refuses the jobs, or a job cannot begin.
        """
        places = self._adopt(kind, {item["key"] for item in items})
        new = [item for item in items if item["key"] not in places]
        waiting = [new[start : start + width] for start in range(0, len(new), width or 1)]
        found: dict[str, tuple[Any, str | None]] = {}
        pause, watch = PAUSE, _Watch(self.log)
        with progress(f"Slurm: {kind}", total=len(items), unit="items") as advance:
            while len(found) < len(items):
                waiting = self._submit(kind, waiting, places)
                queue = slurm.queue()
                watch.report(queue, {place.name for place in places.values()})
                ended = self._ended({key: place for key, place in places.items() if key not in found}, queue)
                for key, answer in ended.items():
                    found[key] = answer
                    advance(1, note=key)
                pause = PAUSE if ended else min(LONGEST_PAUSE, 1.3 * pause)
                if enough is not None and sum(lost is None for _, lost in found.values()) >= enough:
                    slurm.cancel(self._arrays.values())
                    break
                if len(found) < len(items):
                    time.sleep(pause)
        self._arrays.clear()
        return found

    def _adopt(self, kind: str, keys: Iterable[str]) -> dict[str, _Place]:
        """Return the tasks in the queue that an earlier command submitted for these items."""
        wanted, places = set(keys), {}
        for task in slurm.queue() or [] if wanted else []:
            if not task.job.startswith(f"basecap-{kind}-"):
                continue
            batch = SlurmBatch(self.out / "slurm" / task.job)
            for item in batch.content["tasks"][task.index] if batch.content else ():
                if item["key"] in wanted:
                    places[item["key"]] = _Place(batch, task.index)
                    self._arrays[batch.path.name] = task.id.partition("_")[0]
        if places:
            self.log(f"Slurm jobs {' '.join(self._arrays.values())} of an earlier command go on: {len(places)} {kind}.")
        return places

    def _submit(
        self, kind: str, tasks: list[list[dict[str, Any]]], places: dict[str, _Place]
    ) -> list[list[dict[str, Any]]]:
        """Submit tasks as an array, or its first part where the queue is full; return those that Slurm did not take."""
        count = len(tasks)
        while count:
            batch = SlurmBatch.create(self.out, kind, self._shared(), tasks[:count])
            script = batch.script(Path(sys.executable), [batch.path / "tasks.json", *self.needed])
            try:
                number = slurm.submit(script, batch.path.name, count, slurm.options_of(kind, self.settings))
            except (slurm.QueueFull, ConfigError) as error:
                batch.remove()
                if not isinstance(error, slurm.QueueFull):
                    raise
                count //= 2
                continue
            self._arrays[batch.path.name] = number
            write_json(self.out / SETTINGS, {"settings": self.settings})
            self.log(f"submitted Slurm job {number}: {count} tasks to {kind} {sum(map(len, tasks[:count]))}.")
            for index, task in enumerate(tasks[:count]):
                places.update({item["key"]: _Place(batch, index) for item in task})
            return tasks[count:]
        if tasks and not places:
            self.log("Slurm takes no more jobs for now; waiting until it does.")
        return tasks

    def _shared(self) -> dict[str, Any]:
        """Return what all tasks of a batch share."""
        on = self.execution.on
        plugins = {str(path.absolute()): digest for path, digest in self.execution.plugins.items()}
        profile = self.execution.profile
        return {"device": on.device, "per_device": on.per_device, "plugins": plugins, "profile": profile}

    def _ended(
        self, places: Mapping[str, _Place], queue: Sequence[slurm.QueuedTask] | None
    ) -> dict[str, tuple[Any, str | None]]:
        """Return, of the tasks that have ended, the answers or why they are lost."""
        alive = None if queue is None else {task.place for task in queue}
        answers: dict[_Place, tuple[dict[str, Any], str | None]] = {}
        for place in dict.fromkeys(places.values()):
            answer = place.batch.answer(place.index)
            if answer is not None and "error" in answer:
                self._give_up(answer["error"])
            if answer is not None:
                answers[place] = answer["items"], None
            elif alive is not None and place.name not in alive:
                lost = self._lost(place)
                if lost is not None:
                    answers[place] = {}, lost
        return {
            key: (answers[place][0].get(key), answers[place][1]) for key, place in places.items() if place in answers
        }

    def _lost(self, place: _Place) -> str | None:
        """Return why a task that is in the queue no more has no answer; None while it may still appear."""
        number = self._arrays[place.batch.path.name]
        id = f"{number}_{place.index}"
        state, code = slurm.describe_end(id)
        path = unseen(code, [self.out, *self.needed])
        if path is not None:
            self._give_up(f"the nodes of Slurm do not see {path}; put it on a file system that all nodes share.")
        if state in ("COMPLETED", "COMPLETING", "") and self._patience(place):
            return None
        how = f"was {state.lower()}" if state in ("CANCELLED",) else f"ended as {state or 'unknown'}"
        return f"Slurm job {id} {how}, see {place.batch.path / f'{place.index}.log'}"

    def _patience(self, place: _Place) -> bool:
        """Whether a file that a node wrote may still appear here."""
        since = self._missing.setdefault(place, time.monotonic())
        return time.monotonic() - since < GRACE

    def _give_up(self, sentence: str) -> None:
        """Cancel the jobs, which all fail alike, and raise ConfigError."""
        slurm.cancel(self._arrays.values())
        raise ConfigError(sentence)


def _prepare_text(execution: Execution, log: Callable[[str], None]) -> None:
    """Have an array of jobs prepare the text of a study together, if the settings ask for it and that is not done.

    Raises ConfigError where the jobs cannot prepare it, or all of them were lost.
    """
    section, count = execution.study.data, slurm.preparing(_settings(execution))
    if section is None or not count:
        return
    cache = cache_of(section, execution.out).absolute()
    if find_prepared(section, cache) is not None:
        return
    for directory in (execution.out, cache):
        directory.mkdir(parents=True, exist_ok=True)
    arrays = _Arrays(execution, log, cache)
    given = {"data": section.model_dump(mode="json"), "cache": str(cache)}
    items = [{"key": f"text {section.hash} by job {number}", **given} for number in range(count)]
    try:
        found = arrays._do("prepare", items, 1, enough=1)  # each job ends when the whole text is prepared
    except KeyboardInterrupt:
        arrays.say_left()
        raise
    if all(lost is not None for _, lost in found.values()):
        raise ConfigError(f"{next(iter(found.values()))[1]}; run the same command again to prepare what is left.")


@executor("slurm", remote=True, refuse=_refuse, prepare=_prepare_text)
class SlurmExecutor(_Arrays, Executor):
    """Has jobs of Slurm do the work; leaving its context leaves them in the queue."""

    def __init__(self, execution: Execution, runtime: Runtime, devices: Sequence[str]):
        """Take what the jobs share; raises ConfigError where a path that jobs need is missing."""
        super().__init__(execution, runtime.log)
        self.runtime = runtime

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Say which jobs go on."""
        if isinstance(error, KeyboardInterrupt):
            self.say_left()

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Trial]]:
        """Try runs in one job, see `basecap.run.trial`."""
        found = self._do("try", [run_item(run) for run in runs], len(runs))
        for run in runs:
            answer, lost = found[run.label]
            yield run, _trial(answer) if lost is None else Trial(failure=JobFailure(message=lost))

    def train(self, runs: Sequence[RunSpec]) -> list[RunInfo]:
        """Return each run's info in the order of `runs`."""
        items = [run_item(run) for run in runs if not self.runtime.run_records(run).finished]
        found = self._do("train", items, self._width)
        return [self._info(run, found.get(run.label, (None, None))[1]) for run in runs]

    def evaluate(
        self, points: Sequence[StoredPoint], show: Callable[[str], None]
    ) -> Iterator[tuple[StoredPoint, Mapping[str, JobFailure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed."""
        items = [point_item(point) for point in points]
        found = self._do("evaluate", items, self._width)
        for point, item in zip(points, items, strict=True):
            answer, lost = found[item["key"]]
            failures = {name: _failure(one) for name, one in (answer or {}).items()}
            if lost is not None:
                failures = dict.fromkeys(point.evaluations, JobFailure(message=lost))
            yield point, {name: failure for name, failure in failures.items() if failure is not None}

    @property
    def _width(self) -> int:
        """How many runs a job gets."""
        jobs = self.execution.on.per_device
        return slurm.gpus_of(self.settings) * (MOST if jobs == "auto" else jobs)

    def _info(self, run: RunSpec, lost: str | None) -> RunInfo:
        """Return what is recorded of a run; record why it has not ended where its job is `lost`."""
        records = self.runtime.run_records(run)
        info = records.info() or starting_info(records, run, self.runtime.device)
        if lost is None or info.finished:
            return info
        info = info.failed(f"{lost}; the run resumes from its last checkpoint.")
        with self.runtime.records.claimed(records) as mine:
            if mine:
                records.write_info(info)
        self.log(f"{run.label} failed: {info.message}")
        return info


class _Watch:
    """Logs how many tasks wait and why, whenever that changes."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.said = log, ""

    def report(self, queue: Sequence[slurm.QueuedTask] | None, places: Iterable[tuple[str, int]]) -> None:
        """Log what changed for these tasks."""
        if queue is None:
            words = "Slurm does not answer; its jobs go on, and this command waits."
        else:
            own = {*places}
            tasks = [task for task in queue if task.place in own]
            pending = [task for task in tasks if task.state == "PENDING"]
            reasons = ", ".join(sorted({task.reason for task in pending} - {"None"}))
            words = f"Slurm: {len(tasks) - len(pending)} tasks run, {len(pending)} wait ({reasons})." if reasons else ""
        if words and words != self.said:
            self.log(words)
        self.said = words or self.said


def _trial(answer: dict[str, Any]) -> Trial:
    seconds = {int(threads): taken for threads, taken in answer["step_seconds"].items()}
    return Trial(failure=_failure(answer["failure"]), untested=tuple(answer["untested"]), step_seconds=seconds)


def _failure(answer: dict[str, Any] | None) -> JobFailure | None:
    return None if answer is None else JobFailure(**answer)

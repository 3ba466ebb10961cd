"""Passes the rows that runs write to trackers: a thread reads them from disk, so that training waits for nothing."""

import contextlib
import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from basecap.errors import ConfigError
from basecap.records import RunRecords, StudyRecords
from basecap.run.trackers._contract import TRACKERS, TrackedRun, Tracker
from basecap.system.files import read_json, write_json
from basecap.system.locks import Busy, locked

#: Seconds between two looks at the records, and that a command waits for its trackers at its end.
EVERY, PATIENCE = 2.0, 60.0

#: Rows after which it is noted that a tracker has them.
AT_ONCE = 500
#: Files of a run that are followed.
METRICS, EVALS = "metrics.jsonl", "evals.jsonl"


def chosen_trackers(options: Sequence[str]) -> dict[str, str | None]:
    """Return the trackers that `--track NAME` or `NAME:WHERE` name, and where; raises ConfigError."""
    chosen: dict[str, str | None] = {}
    for option in options:
        name, colon, where = option.partition(":")
        kind = TRACKERS.get(name)
        if name in chosen:
            raise ConfigError(f"--track {name} is given twice; remove one.")
        if find_spec(kind.library) is None:
            raise ConfigError(f"--track {name} needs the library {kind.library}; install basecap[{name}].")
        if colon:
            kind.refuse(name, where)
        chosen[name] = where or None
    return chosen


class Rows:
    """The complete rows of a file that grows. A resumed run may shorten it, and then writes the same rows again."""

    def __init__(self, path: Path, read: int):
        """Take the file, and how many of its rows have been read."""
        self.path = path
        self.read = read
        self._offset, self._at = 0, 0
        self._last = b""  # the row that ends at the offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that have not been read."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:  # it was shortened, and may have grown again
                self._offset, self._at = file.seek(0), 0
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._at, self._last = self._offset + len(line), self._at + 1, line
                if self._at > self.read:
                    self.read = self._at
                    yield json.loads(line)


class FollowedRun:
    """One run with one tracker, which is made for the first row that it lacks.

    DIR/tracking/NAME/RUN/sent.json says which run of the tracker it is, and how many rows that has.
    """

    def __init__(self, records: RunRecords, kind: type[Tracker], study: str, directory: Path, where: str | None):
        """Take the run, the tracker, and what `TrackedRun` has."""
        self._state = directory / "sent.json"
        state = read_json(self._state) or {"identity": secrets.token_hex(8)}
        self._identity = state["identity"]
        self._rows = {name: Rows(records.path / name, state.get(name, 0)) for name in (METRICS, EVALS)}
        info, about = records.info(), {}
        if info is not None:
            about = {key: value for key, value in info.row().items() if isinstance(value, str | int | float)}
        run = TrackedRun(
            study=study,
            name=records.path.name,
            identity=self._identity,
            directory=directory,
            where=where,
            about={key: about[key] for key in ("use", "seed", "lr", "schedule", "tokens", "task") if key in about},
        )
        self._make = partial(kind, run)
        self._tracker: Tracker | None = None

    def send(self) -> None:
        """Pass the new rows on; raises whatever the library raises."""
        before = self._read
        for row in self._rows[METRICS].new():
            self._write(row["step"], {_training_name(key): value for key, value in row.items() if key != "step"})
            if self._rows[METRICS].read % AT_ONCE == 0:
                self._note()
        held: dict[str, Any] = {}
        step = None
        for row in self._rows[EVALS].new():
            if row["step"] != step:
                self._write(step, held)
                held, step = {}, row["step"]
            held[_evaluation_name(row)] = row["value"]
        self._write(step, held)
        if self._read != before:
            self._note()

    @property
    def _read(self) -> dict[str, int]:
        return {name: rows.read for name, rows in self._rows.items()}

    def _note(self) -> None:
        """Note how many rows the tracker has."""
        if self._tracker is not None:
            self._tracker.flush()
        write_json(self._state, {"identity": self._identity, **self._read})

    def _write(self, step: int | None, values: Mapping[str, Any]) -> None:
        finite = {
            name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
        }
        if step is None or not finite:
            return
        if self._tracker is None:
            if not self._state.exists():  # a run that is killed before the first rows are noted keeps its identity
                write_json(self._state, {"identity": self._identity})
            self._tracker = self._make()
        self._tracker.write(step, finite)

    def close(self) -> None:
        """Let go of the run."""
        if self._tracker is not None:
            self._tracker.close()


def _training_name(key: str) -> str:
    return f"train/{key.removeprefix('train_')}"


def _evaluation_name(row: Mapping[str, Any]) -> str:
    axes = [f"{name}-{value}" for name, value in sorted((row.get("axis") or {}).items())]
    return "/".join([row["eval"], *([row["subset"]] if row.get("subset") else []), row["metric"], *axes])


class Follower:
    """Follows every run of a study while its context is entered, and sends what is left at its end.

    What a tracker raises is one warning: the study goes on without it.
    """

    def __init__(self, records: StudyRecords, chosen: Mapping[str, str | None], study: str, log: Callable[[str], None]):
        """Take the study's records, what `chosen_trackers` returned, its title, and what takes a warning."""
        self._records = records
        self._chosen = dict(chosen)
        self._study = study
        self._log = log
        self._runs: dict[tuple[str, Path], FollowedRun] = {}
        self._locks: dict[str, contextlib.ExitStack] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def __enter__(self) -> "Follower":
        """Start the thread, if anything is to be tracked."""
        if self._chosen:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the rows are sent."""
        self._ended.set()
        if self._chosen:
            self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._log(f"Warning: --track {', '.join(self._chosen)} has not ended after {PATIENCE:.0f} s; it is left.")

    def _follow(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(EVERY)
            self._each(self._look)
        self._each(self._close)
        for lock in self._locks.values():
            lock.close()

    def _each(self, work: Callable[[str], None]) -> None:
        for name in list(self._chosen):
            try:
                work(name)
            except Exception as error:  # of any library: a tracker never ends a training
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self._log(f"Warning: --track {name} failed ({reason}); the study goes on without it.")
                del self._chosen[name]

    def _look(self, name: str) -> None:
        """Send what is new; of several commands on the directory one does so, and when it ends the next one."""
        directory = self._records.path / "tracking" / name
        if name not in self._locks and self._records.path.is_dir():
            try:
                with contextlib.ExitStack() as held:
                    held.enter_context(locked(directory, "another command tracks the study"))
                    self._locks[name] = held.pop_all()
            except Busy:
                return
        for path in [*(self._records.path / "runs").glob("*"), *(self._records.path / "sweep").glob("*")]:
            if (name, path) not in self._runs and (path / METRICS).is_file():
                below = directory / path.name
                below.mkdir(parents=True, exist_ok=True)
                self._runs[name, path] = FollowedRun(
                    RunRecords(path), TRACKERS.get(name), self._study, below, self._chosen[name]
                )
            if (name, path) in self._runs:
                self._runs[name, path].send()

    def _close(self, name: str) -> None:
        for (used, _), run in self._runs.items():
            if used == name:
                run.close()

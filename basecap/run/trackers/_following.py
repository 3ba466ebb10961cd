"""Passes the rows that runs write to trackers: a thread reads them from disk, so that training waits for nothing."""

import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from basecap.errors import ConfigError
from basecap.records import RunRecords, StudyRecords
from basecap.run.trackers._contract import TRACKERS, TrackedRun, Tracker
from basecap.system.files import read_json, write_json

#: Seconds between two looks at the records, and that a command waits for its trackers at its end.
EVERY, PATIENCE = 2.0, 60.0

#: Files of a run that are followed.
METRICS, EVALS = "metrics.jsonl", "evals.jsonl"


def chosen_trackers(options: Sequence[str]) -> dict[str, str | None]:
    """Return the trackers that `--track NAME` or `NAME:WHERE` name, and where; raises ConfigError."""
    chosen: dict[str, str | None] = {}
    for option in options:
        name, _, where = option.partition(":")
        library = TRACKERS.get(name).library
        if name in chosen:
            raise ConfigError(f"--track {name} is given twice; remove one.")
        if find_spec(library) is None:
            raise ConfigError(f"--track {name} needs the library {library}; install basecap[{name}].")
        chosen[name] = where or None
    return chosen


class Rows:
    """The complete rows of a file that grows. A resumed run may shorten it, and then writes the same rows again."""

    def __init__(self, path: Path, read: int):
        """Take the file, and how many of its rows have been read."""
        self.path = path
        self.read = read
        self._offset, self._at = 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that have not been read."""
        if not self.path.is_file():
            return
        if self.path.stat().st_size < self._offset:
            self._offset, self._at = 0, 0
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._at = self._offset + len(line), self._at + 1
                if self._at > self.read:
                    self.read = self._at
                    yield json.loads(line)


class FollowedRun:
    """One run with one tracker; DIR/tracking/NAME/RUN/sent.json says how many rows the tracker has."""

    def __init__(self, records: RunRecords, kind: type[Tracker], study: str, directory: Path, where: str | None):
        """Continue the tracking of a run, or begin it; raises whatever the library raises."""
        self._state = directory / "sent.json"
        state = read_json(self._state) or {"identity": secrets.token_hex(8)}
        self._identity = state["identity"]
        self._rows = {name: Rows(records.path / name, state.get(name, 0)) for name in (METRICS, EVALS)}
        info, about = records.info(), {}
        if info is not None:
            about = {key: value for key, value in info.row().items() if isinstance(value, str | int | float)}
        self._tracker = kind(
            TrackedRun(
                study=study,
                name=records.path.name,
                identity=self._identity,
                directory=directory,
                where=where,
                about={key: about[key] for key in ("use", "seed", "lr", "schedule", "tokens", "task") if key in about},
            )
        )

    def send(self) -> None:
        """Pass the new rows on."""
        before = {name: rows.read for name, rows in self._rows.items()}
        for row in self._rows[METRICS].new():
            self._write(row["step"], {_training_name(key): value for key, value in row.items() if key != "step"})
        held: dict[str, Any] = {}
        step = None
        for row in self._rows[EVALS].new():
            if row["step"] != step:
                self._write(step, held)
                held, step = {}, row["step"]
            held[_evaluation_name(row)] = row["value"]
        self._write(step, held)
        after = {name: rows.read for name, rows in self._rows.items()}
        if after != before:
            write_json(self._state, {"identity": self._identity, **after})

    def _write(self, step: int | None, values: Mapping[str, Any]) -> None:
        finite = {
            name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
        }
        if step is not None and finite:
            self._tracker.write(step, finite)

    def close(self) -> None:
        """Let go of the run."""
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

    def _each(self, work: Callable[[str], None]) -> None:
        for name in list(self._chosen):
            try:
                work(name)
            except Exception as error:  # of any library: a tracker never ends a training
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self._log(f"Warning: --track {name} failed ({reason}); the study goes on without it.")
                del self._chosen[name]

    def _look(self, name: str) -> None:
        for path in [*(self._records.path / "runs").glob("*"), *(self._records.path / "sweep").glob("*")]:
            if (name, path) not in self._runs and (path / METRICS).is_file():
                directory = self._records.path / "tracking" / name / path.name
                directory.mkdir(parents=True, exist_ok=True)
                self._runs[name, path] = FollowedRun(
                    RunRecords(path), TRACKERS.get(name), self._study, directory, self._chosen[name]
                )
            if (name, path) in self._runs:
                self._runs[name, path].send()

    def _close(self, name: str) -> None:
        for (used, _), run in self._runs.items():
            if used == name:
                run.close()

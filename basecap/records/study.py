"""The files of a study on disk. Only this module knows their names and formats.

    DIR/study.yaml            the resolved study          DIR/environment.json   versions, device, data
    DIR/declarations.json     units of the evaluations    DIR/results.json       the analysis
    DIR/report.html           the report                  DIR/figures/           its figures, if asked for
    DIR/lock                  held during set-up          DIR/data/              token shards, unless data.cache is set
    DIR/locks/                one for each command and each run in training
    DIR/runs/<name>-s<seed>/  run.json                    `RunInfo`: name, seed, status, message, machine
                              metrics.jsonl               one row per logged training step
                              evals.jsonl                 one `Record` per row
                              documents/<eval>.losses     losses of single documents, see `basecap.records.documents`
                              maps/<eval>-<step>.npz      `Maps` of the layers on one input
                              unmeasured.json             evaluations that do not apply to its model
                              resume/, weights/           written by the training loop
                              profile/                    traces of training steps, if asked for
    DIR/imported/<name>/      the same files of a model that was trained elsewhere, and its tokenizer.json
    DIR/tracking/<tracker>/   what `basecap run --track` wrote
    DIR/sweep/<name>-lr<rate>-s<seed>/                    the same for runs of a sweep with another rate than the chosen
    DIR/sweep.json            the sweep of learning rates: one `Sweep` per architecture
    DIR/looks.json            number of seeds at each interim analysis (look) of --until-decided
    DIR/tables.json           seeds that were planned whenever a table of a study of text was made

Files are replaced atomically (written to a temporary file, then renamed) or grow by lines or blocks: a killed process
loses at most part of the last one, and what a finished run has recorded is on the disk before its run.json says so.
JSON is strict: a number that is not finite is stored as null and read back as NaN.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from basecap.errors import ConfigError, DataError, nearest
from basecap.records.measured import Declaration
from basecap.records.run import RunInfo, RunRecords
from basecap.system.files import (
    SCHEMA,
    entries,
    plain,
    process_name,
    read,
    read_json,
    replacing,
    safe_name,
    without_schema,
    write_json,
    writing,
)
from basecap.system.foreign import open_to_append, refuse_link
from basecap.system.locks import ENDING, Busy, is_locked, locked, remove_ended
from basecap.system.place import Place, watched
from basecap.system.yaml_text import parse_yaml

#: Files that a directory may contain before its study starts: the lock, prepared text, and jobs that prepare it.
ALLOWED_BEFORE = ("lock", "lock.lease", "locks", "data", "slurm")
#: Beginning of the names of the locks of commands.
COMMAND = "command-"
#: Entry of environment.json, see `StudyRecords.run_threads`.
RUN_THREADS = "run_threads"
#: What an analysis takes from runs alone.
MEASURED = ("points", "documents")


@dataclass(frozen=True)
class Sweep:
    """The learning rates that one architecture was trained with, and the chosen one.

    `losses` are the final losses of each rate in nats per token, on the `split` documents of the training domains; None
    for a run that diverged. The run of the `chosen` rate is stored with the other runs of the study. A sweep that
    `reached` train.stop_at with a rate did not try those after it.
    """

    name: str
    seed: int
    split: str
    rates: tuple[float, ...]
    losses: tuple[float | None, ...]
    chosen: float
    reached: bool = False

    @property
    def at_edge(self) -> bool:
        """Whether a better rate may lie beyond the chosen one, the lowest or the highest where none was `reached`."""
        return not self.reached and self.chosen in (min(self.rates), max(self.rates))


#: Validates sweep.json.
_SWEEPS = TypeAdapter(list[Sweep], config=ConfigDict(defer_build=True))  # few studies have one


class StudyRecords:
    """The records of one study: a directory."""

    def __init__(self, path: Path):
        self.path = Path(path)
        #: Its directory while this process works in it, for the records of its runs.
        self.place: Place | None = None

    @property
    def has_study(self) -> bool:
        """Whether the directory holds a study."""
        return read(self.path / "study.yaml") is not None

    def refuse_foreign(self) -> None:
        """Raise ConfigError or DataError when the directory holds files other than a study or runs copied from one."""
        if self.has_study:
            self.study()
        else:
            foreign = [path for path in entries(self.path) if path.name not in ALLOWED_BEFORE and path.name[0] != "."]
            may_hold_runs = (self.path / "runs").is_dir() and (self.runs() or not entries(self.path / "runs"))
            _refuse([path for path in foreign if path.name != "runs" or not may_hold_runs])

    def refuse_foreign_report(self) -> None:
        """Raise ConfigError or DataError when a report written here would replace files that basecap did not write."""
        if self.has_study:
            self.study()
        elif read_json(self.path / "results.json") is None:
            _refuse([path for path in entries(self.path) if path.name in ("report.html", "figures")])

    def refuse_lost_results(self, replaced_by: dict[str, Any] | None = None, failures: Sequence[str] = ()) -> None:
        """Raise DataError when results.json has results of deleted runs that `replaced_by` lacks, for these `failures`.

        `replaced_by` is None before training, which may replace deleted runs if the directory `runs` still exists.
        """
        starts, found = replaced_by is None, _measured(replaced_by)
        if found == {*MEASURED} and self.runs():
            return  # it holds all there can be: the file, which may be large, need not be read
        try:
            held = _measured(read_json(self.path / "results.json"))
        except (AttributeError, TypeError, DataError) as error:
            if self.runs():
                return  # results.json will be computed again from them
            raise DataError(f"{self.path / 'results.json'} is damaged; restore or remove it.") from error
        kept = not self.has_study or ((self.path / "runs").is_dir() if starts else self.runs())
        if (held and not kept) or (not starts and held - found):
            lost = f"runs that are not in {self.path}" + (f" ({failures[0].rstrip('.')})" if failures else "")
            what = f"{self.path / 'results.json'} has results of {lost}"
            raise DataError(f"{what}; restore the runs, remove results.json or give another --out.")

    @contextlib.contextmanager
    def locked(self, log: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """Change what commands on this study share; waits for another process that does and says so to `log`."""
        self.refuse_left()
        with contextlib.ExitStack() as held:
            with writing(self.path / "lock"):
                try:
                    held.enter_context(locked(self.path, "another command sets the study up"))
                except Busy:
                    log(f"waiting for another command that sets up the study in {self.path}.")
                    held.enter_context(locked(self.path))
            yield

    @contextlib.contextmanager
    def entered(self) -> Iterator["StudyRecords"]:
        """Work on this study, maybe beside other processes, and yield it.

        Within the context the records of its runs are written to this directory alone, wherever its path leads.
        """
        locks = self.path / "locks"
        with contextlib.ExitStack() as held:
            with writing(self.path / "lock"):
                remove_ended(locks, COMMAND)
                held.callback(_remove_empty, locks)
                held.enter_context(locked(locks, name=f"{COMMAND}{process_name()}-{time.monotonic_ns()}", keep=False))
                open_to_append(self.path / "lock").close()
                self.place = held.enter_context(watched(self.path))
                held.callback(setattr, self, "place", None)
            yield self

    def watch(self) -> None:
        """Write to this directory alone, which another process works in, until this process ends."""
        self.place = Place(self.path)

    def refuse_left(self) -> None:
        """Raise LostDirectory when this directory was moved, removed or replaced since work in it began."""
        if self.place is not None:
            self.place.refuse_left()

    @contextlib.contextmanager
    def claimed(self, run: RunRecords, wait: bool = False) -> Iterator[bool]:
        """Yield whether a run is this process's alone within the context, as others neither train nor evaluate it.

        Args:
            run: one of this study.
            wait: whether to wait for another process until that is so.
        """
        self.refuse_left()
        name = self._lock_of(run)
        with contextlib.ExitStack() as held:
            try:
                with writing(self.path / "locks" / name):
                    busy = None if wait else f"another process works on {run.path}"
                    lock = held.enter_context(locked(self.path / "locks", busy, name, keep=False))
            except Busy:
                yield False
                return
            if self.place is not None:
                self.place.held.append(lock)
                held.callback(self.place.held.remove, lock)
            yield True

    def is_claimed(self, run: RunRecords) -> bool:
        """Whether a process works on a run."""
        return is_locked(self.path / "locks", self._lock_of(run))

    def _lock_of(self, run: RunRecords) -> str:
        return "-".join(run.path.relative_to(self.path).parts)

    @property
    def busy(self) -> bool:
        """Whether a process works on the study."""
        locks = {path.name.removesuffix(ENDING) for path in entries(self.path / "locks")}
        return is_locked(self.path) or any(is_locked(self.path / "locks", name) for name in locks)

    def state(self) -> dict[Path, tuple[int, int]]:
        """Return modification time and size of each file that the report depends on, to detect changes."""
        files = [run.path / name for run in self.runs() for name in ("run.json", "evals.jsonl")]
        return {path: (stat.st_mtime_ns, stat.st_size) for path in files if path.exists() and (stat := path.stat())}

    def create(self, study: dict[str, Any]) -> None:
        """Write study.yaml; raises ConfigError or DataError when the directory holds other files."""
        self.refuse_foreign()
        text = yaml.safe_dump({"schema": SCHEMA, **plain(study)}, sort_keys=False, allow_unicode=True).encode()
        if read(self.path / "study.yaml") != text:
            with replacing(self.path / "study.yaml") as file:
                file.write(text)

    def study(self) -> dict[str, Any]:
        """Return the resolved study with current keys; raises ConfigError when the directory holds no study."""
        path = self.path / "study.yaml"
        text = read(path)
        if text is None:
            raise ConfigError(f"{self.path} holds no study (no study.yaml); {self._studies_near()}")
        try:
            study = parse_yaml(text)
        except ValueError as error:
            raise DataError(f"{path} {error}; restore it, or give another directory.") from error
        return _with_current_keys(without_schema(study, path))

    def _studies_near(self) -> str:
        near = [self.path.parent, self.path.parent.parent, *entries(self.path)]
        with contextlib.suppress(DataError):  # directories of other people may be unreadable, here and below
            near += entries(self.path.parent)
        studies = []
        for place in dict.fromkeys(near):
            with contextlib.suppress(DataError):
                text = read(place / "study.yaml") or b""
                studies += [str(place)] * text.startswith(b"schema:")  # else it may be a study file of the user
        if len(studies) == 1:
            return f"did you mean {studies[0]!r}?"
        return nearest(str(self.path), studies) if studies else "give the directory of `basecap run`."

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Write the versions and the device that the study started with, and the hash of the data manifest.

        Read the content that it is to keep within the same `locked`, as other commands add to it.
        """
        write_json(self.path / "environment.json", environment)

    def environment(self) -> dict[str, Any]:
        """Return the content of environment.json, {} when it does not exist."""
        return read_json(self.path / "environment.json") or {}

    def run_threads(self) -> dict[str, int]:
        """Return the CPU threads that runs on a CPU train with, by architecture, once chosen; raises DataError."""
        found = self.environment().get(RUN_THREADS, {})
        if not isinstance(found, dict) or not all(isinstance(count, int) and count > 0 for count in found.values()):
            raise DataError(f"{self.path / 'environment.json'}: {RUN_THREADS} must name numbers of threads; remove it.")
        return found

    def write_declarations(self, declarations: Iterable[Declaration]) -> None:
        """Write the declarations of the study's evaluations."""
        rows = [dataclasses.asdict(declaration) for declaration in declarations]
        write_json(self.path / "declarations.json", {"declarations": rows})

    def imported(self, name: str | None = None) -> list[RunRecords]:
        """Return the records of models that were trained elsewhere, by name, or those that one called `name` has."""
        place = self.path / "imported"
        paths = [place / safe_name(name)] if name is not None else entries(place)
        return [RunRecords(path) for path in paths if not path.name.startswith(".")]

    def results(self) -> dict[str, Any] | None:
        """Return the content of results.json, None when no report was written; raises DataError when it is damaged."""
        return read_json(self.path / "results.json")

    def declarations(self) -> dict[str, Declaration]:
        """Return the declarations by name, {} when none are stored; raises DataError when the file is damaged."""
        path = self.path / "declarations.json"
        try:
            found = read_json(path)
            rows = [] if found is None else found["declarations"]
            return {row["name"]: Declaration(**{**row, "axes": tuple(row["axes"])}) for row in rows}
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); restore or remove it.") from error

    def run(self, name: str, seed: int, rate: float | None = None) -> RunRecords:
        """Return the records of one run, one of the sweep if a learning `rate` is given; touches no file."""
        if rate is not None:
            return RunRecords(self.path / "sweep" / f"{safe_name(name)}-lr{rate!r}-s{seed}", self.place)
        return RunRecords(self.path / "runs" / f"{safe_name(name)}-s{seed}", self.place)

    def runs(self, sweep: bool = False) -> list[RunRecords]:
        """Return all runs that have started, or all of the `sweep`, sorted by directory."""
        return [
            run
            for run in map(RunRecords, entries(self.path / ("sweep" if sweep else "runs")))
            if run.info() is not None
        ]

    def refuse_misplaced(self, run: RunRecords, info: RunInfo) -> None:
        """Raise DataError for a run that is not in the directory of its name and seed, where it would not be read."""
        place = self.run(info.name, info.seed).path
        if run.path.name != place.name:
            path = run.path / "run.json"
            if place.exists():
                raise DataError(f"{path} is a copy of the run in {place}; move {run.path} out of the study.")
            raise DataError(f"{path} is that of {place}, which does not exist; rename {run.path} to {place.name}.")

    def write_sweeps(self, sweeps: Iterable[Sweep]) -> None:
        """Write the finished sweeps."""
        write_json(self.path / "sweep.json", {"sweeps": [dataclasses.asdict(sweep) for sweep in sweeps]})

    def sweeps(self) -> list[Sweep]:
        """Return the finished sweeps, [] when none are stored; raises DataError when the file is damaged."""
        path = self.path / "sweep.json"
        try:
            return _SWEEPS.validate_python((read_json(path) or {"sweeps": []})["sweeps"])
        except (KeyError, ValidationError) as error:
            raise DataError(f"{path} is damaged; restore it, or remove it to choose the rates again.") from error

    def write_looks(self, looks: dict[str, Any]) -> None:
        """Write the number of seeds at each interim analysis, and the maximum."""
        write_json(self.path / "looks.json", looks)

    def looks(self) -> dict[str, Any] | None:
        """Return the content of looks.json, None when it does not exist."""
        return read_json(self.path / "looks.json")

    def write_tables(self, tables: dict[str, Any]) -> None:
        """Write the plans of the study at which a table of its results was made."""
        write_json(self.path / "tables.json", tables)

    def tables(self) -> dict[str, Any] | None:
        """Return the content of tables.json, None when it does not exist."""
        return read_json(self.path / "tables.json")

    def write_results(self, results: dict[str, Any]) -> None:
        """Write the analysis."""
        write_json(self.path / "results.json", results)

    def write_report(self, page: str, figures: dict[str, bytes]) -> Path:
        """Write report.html and its figures (by file name); return the path of report.html.

        Raises DataError when a file cannot be written, or the directory of the figures is a link.
        """
        refuse_link(self.path / "figures")
        files = {f"figures/{name}": figure for name, figure in figures.items()} | {"report.html": page.encode()}
        for name, content in files.items():
            with replacing(self.path / name) as file:
                file.write(content)
        return self.path / "report.html"


def _with_current_keys(study: dict[str, Any]) -> dict[str, Any]:
    """Return a study with the keys of archived records, some of which have moved and one of which is no longer used."""
    train, gap = study.get("train"), study.get("gap")
    if isinstance(train, dict) and "seeds" in train:
        study = study | {"seeds": train["seeds"], "train": {key: train[key] for key in train if key != "seeds"}}
    if isinstance(gap, dict):
        study = study | {"gap": {key: gap[key] for key in gap if key != "tolerance"}}
    return study


def _refuse(foreign: Sequence[Path]) -> None:
    if foreign:
        raise ConfigError(f"{foreign[0]} was not written by basecap; give another --out or move it away.")


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _measured(results: dict[str, Any] | None) -> set[str]:
    """Return which of `MEASURED` an analysis has results of."""
    return {key for study in (results or {}).get("studies", []) for key in MEASURED if study.get(key)}

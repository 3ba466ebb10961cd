"""The files of a study on disk. Only this module knows their names and formats.

    DIR/study.yaml            the resolved study          DIR/environment.json   versions, device, data
    DIR/declarations.json     units of the evaluations    DIR/results.json       the analysis
    DIR/report.html           the report                  DIR/figures/*.svg      its figures, if asked for
    DIR/lock                  held while a study runs     DIR/data/              token shards, unless data.cache is set
    DIR/runs/<name>-s<seed>/  run.json                    name, seed, parameters, status, message
                              metrics.jsonl               one row per logged training step
                              evals.jsonl                 one `Record` per row
                              documents/<eval>.losses     losses of single documents, see `basecap.records.documents`
                              maps/<eval>-<step>.npz      `Maps` of the layers on one input
                              unmeasured.json             evaluations that do not apply to its model
                              resume/, weights/           written by the training loop
    DIR/sweep/<name>-lr<rate>-s<seed>/                    the same for runs of a sweep with another rate than the chosen
    DIR/sweep.json            the sweep of learning rates: one `Sweep` per architecture
    DIR/looks.json            number of seeds at each interim analysis (look) of --until-decided
    DIR/tables.json           seeds that were planned whenever a table of a study of text was made

Files are replaced atomically (written to a temporary file, then renamed) or grow by lines or blocks: a killed process
loses at most part of the last one. JSON is strict: a number that is not finite is stored as null and read back as NaN.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from basecap.errors import ConfigError, DataError, describe_problem
from basecap.records.documents import DocumentLosses, History, append_losses, forget_losses, read_losses
from basecap.records.maps import Maps, read_last, write_maps
from basecap.records.measured import Declaration, Record
from basecap.system.files import (
    SCHEMA,
    append_lines,
    encode_lines,
    entries,
    plain,
    read,
    read_array,
    read_json,
    read_lines,
    replacing,
    safe_name,
    without_schema,
    write_json,
    writing,
)
from basecap.system.locks import is_locked, locked
from basecap.system.yaml_text import parse_yaml

#: Files that a directory may contain before its study starts: the lock and prepared text.
ALLOWED_BEFORE = ("lock", "data")
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


#: Validate the rows of evals.jsonl and of sweep.json.
_RECORDS = TypeAdapter(list[Record])
_SWEEPS = TypeAdapter(list[Sweep], config=ConfigDict(defer_build=True))  # few studies have one


class RunRecords:
    """The records of one run: one architecture, one seed."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def study(self) -> Path:
        """Directory of the study that the run is part of."""
        return Path(os.path.normpath(self.path / ".." / ".."))  # `parent` of a path such as . is none

    @property
    def resume(self) -> Path:
        """Directory of the checkpoints that the run resumes from."""
        return self.path / "resume"

    @property
    def weights(self) -> Path:
        """Directory of the weights kept for later evaluations."""
        return self.path / "weights"

    def write_info(self, info: dict[str, Any]) -> None:
        """Write run.json: name, seed, use, lr, hash, status (running, finished or failed), message, ops.

        `passes` is how often the run reads its training text: its tokens divided by those of the text.

        When finished also parameters and state_bytes (of the decoding state of one sequence, float32).
        `device`, `precision` and `packages` describe the last process, `before` lists those of the processes before it.
        `ops` names the implementation of each op that ran outside compiled code. `seconds` is the time of the run's
        parts, see `basecap.train.wall_time`, over all its processes that ended with a checkpoint or at the end.
        """
        write_json(self.path / "run.json", info)

    def info(self) -> dict[str, Any]:
        """Return run.json, {} for a run that never started; raises DataError when it cannot be read."""
        return read_json(self.path / "run.json") or {}

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row: step, tokens, train_loss, lr, grad_norm, tokens_per_s, seconds."""
        append_lines(self.path / "metrics.jsonl", [row])

    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows in order, with NaN for numbers that were not finite; raises DataError for a damaged row."""
        rows = read_lines(self.path / "metrics.jsonl")
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]

    def append_evals(self, records: Iterable[Record]) -> None:
        """Append records. Write the documents of the step first, so that a step in evals.jsonl is complete."""
        append_lines(self.path / "evals.jsonl", [record.row() for record in records])

    def evals(self) -> list[Record]:
        """Return the last record of each key; raises DataError for a damaged row."""
        path = self.path / "evals.jsonl"
        try:
            records = _RECORDS.validate_json(read_array(path))
        except ValidationError:  # damaged, or with a value that was not finite
            records = self._evals_by_row(path)
        return list({record.key: record for record in records}.values())

    def _evals_by_row(self, path: Path) -> list[Record]:
        rows = [row | {"value": math.nan} if row.get("value", 0) is None else row for row in read_lines(path)]
        try:
            return _RECORDS.validate_python(rows)
        except ValidationError as error:
            problem = error.errors()[0]
            where = f"{path}:{int(problem['loc'][0]) + 1} is damaged at {problem['loc'][1]!r}"
            raise DataError(f"{where} ({describe_problem(problem)}); fix or remove that line.") from error

    def add_unmeasured(self, eval: str) -> None:
        """Record that evaluation `eval` does not apply to this model."""
        write_json(self.path / "unmeasured.json", {"evaluations": sorted({*self.unmeasured(), eval})})

    def unmeasured(self) -> list[str]:
        """Return the evaluations that do not apply to this model."""
        return (read_json(self.path / "unmeasured.json") or {}).get("evaluations", [])

    def append_documents(self, eval: str, step: int, losses: dict[str, DocumentLosses]) -> None:
        """Append the losses of single documents by subset; raises DataError when they cannot be written."""
        append_losses(self._documents_path(eval), step, losses)

    def documents(self, eval: str, steps: Iterable[int]) -> list[History]:
        """Return the losses of single documents at `steps`; raises DataError where some are missing or damaged."""
        return read_losses(self._documents_path(eval), steps)

    def write_maps(self, eval: str, step: int, maps: Maps) -> None:
        """Write the maps of an evaluation at a step."""
        write_maps(self.path / "maps" / f"{safe_name(eval)}-{step}.npz", maps)

    def maps(self) -> dict[str, Maps]:
        """Return the last maps of each evaluation; raises DataError for a damaged file."""
        return read_last(self._maps)

    def rewind(self, step: int) -> None:
        """Remove everything recorded after the checkpoint of `step`, including the evaluation at that step.

        Other programs' files are kept. Raises DataError for a damaged row, and when a file cannot be written.
        """
        for name, first in (("metrics.jsonl", step + 1), ("evals.jsonl", step)):
            path = self.path / name
            if path.exists():
                rows = read_lines(path)
                if not all(isinstance(row.get("step"), int) for row in rows):
                    raise DataError(f"{path} has a row without a step; fix or remove that row.")
                rows = [row for row in rows if row["step"] < first]
                with replacing(path) as file:
                    file.write(encode_lines(rows))
        for path in self._maps:
            if int(path.stem.rpartition("-")[2]) >= step:
                path.unlink()
        for path in (self.path / "documents").glob("*.losses"):
            forget_losses(path, step)

    @property
    def _maps(self) -> list[Path]:
        """The files of maps, which are called EVALUATION-STEP.npz."""
        return [path for path in (self.path / "maps").glob("*.npz") if path.stem.rpartition("-")[2].isdecimal()]

    def _documents_path(self, eval: str) -> Path:
        return self.path / "documents" / f"{safe_name(eval)}.losses"


class StudyRecords:
    """The records of one study: a directory."""

    def __init__(self, path: Path):
        self.path = Path(path)

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
    def locked(self) -> Iterator[None]:
        """Prevent other processes from running this study; raises ConfigError when one does."""
        with contextlib.ExitStack() as held:
            with writing(self.path / "lock"):
                busy = f"another process is running this study in {self.path}; wait for it or use another directory."
                held.enter_context(locked(self.path, busy))
            yield

    @property
    def busy(self) -> bool:
        """Whether a process runs the study."""
        return is_locked(self.path)

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
            raise ConfigError(f"{self.path} holds no study (no study.yaml); give the directory of `basecap run`.")
        try:
            study = parse_yaml(text)
        except ValueError as error:
            raise DataError(f"{path} {error}; restore or remove it.") from error
        return _with_current_keys(without_schema(study, path))

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Write the versions and the device that the study started with, and the hash of the data manifest."""
        write_json(self.path / "environment.json", environment)

    def environment(self) -> dict[str, Any]:
        """Return the content of environment.json, {} when it does not exist."""
        return read_json(self.path / "environment.json") or {}

    def write_declarations(self, declarations: Iterable[Declaration]) -> None:
        """Write the declarations of the study's evaluations."""
        rows = [dataclasses.asdict(declaration) for declaration in declarations]
        write_json(self.path / "declarations.json", {"declarations": rows})

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
            return RunRecords(self.path / "sweep" / f"{safe_name(name)}-lr{rate!r}-s{seed}")
        return RunRecords(self.path / "runs" / f"{safe_name(name)}-s{seed}")

    def runs(self, sweep: bool = False) -> list[RunRecords]:
        """Return all runs that have started, or all of the `sweep`, sorted by directory."""
        return [run for run in map(RunRecords, entries(self.path / ("sweep" if sweep else "runs"))) if run.info()]

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

    def write_report(self, page: str, figures: dict[str, str]) -> Path:
        """Write report.html and its figures (by file name); return the path of report.html."""
        files = {f"figures/{name}": figure for name, figure in figures.items()} | {"report.html": page}
        for name, content in files.items():
            with replacing(self.path / name) as file:
                file.write(content.encode())
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


def _measured(results: dict[str, Any] | None) -> set[str]:
    """Return which of `MEASURED` an analysis has results of."""
    return {key for study in (results or {}).get("studies", []) for key in MEASURED if study.get(key)}

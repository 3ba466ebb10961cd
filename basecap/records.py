"""What a study leaves on disk: the only module that knows the files.

    DIR/study.yaml            the resolved study          DIR/environment.json   versions, device, data
    DIR/declarations.json     what each evaluation means  DIR/results.json       the analysis
    DIR/report.html           what a person reads         DIR/figures/*.svg      its figures
    DIR/lock                  held by who runs the study  DIR/data/              token shards, unless elsewhere
    DIR/runs/<name>-s<seed>/  run.json                    name, seed, parameters, status, message
                              metrics.jsonl               one row per logged training step
                              evals.jsonl                 one `Record` per row
                              documents/<eval>-<step>.npz losses of single documents
                              checkpoints/                belongs to the training loop

A file appears whole (written aside, then renamed) or grows by whole lines: a kill loses at most the end of the
last line. JSON is strict, so a number that is not finite is stored as null and read back as NaN.
Documents hold the arrays `subsets` and `counts` [S] and `nats`, `tokens`, `bytes` [sum of counts].
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from basecap.errors import ConfigError, DataError, in_words
from basecap.files import entries, parse_yaml, read, read_lines, replacing, writing
from basecap.processes import locked

SCHEMA = 1

#: What may stand in a directory before its study begins: the lock, and text that was prepared for it.
BEFORE = ("lock", "data")


@dataclass(frozen=True)
class Declaration:
    """What an evaluation measures, so that a report can draw it without knowing it.

    `axes` names the quantities its records vary over (such as "length"); empty for a single number.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One measured number: `metric` of evaluation `eval` on `subset` after `step` steps (`tokens` tokens).

    `n` counts what was averaged, `stderr` is in the unit of `value`, `axis` is the place on each declared axis.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    tokens: int
    eval: str
    subset: str
    metric: str
    value: float
    n: int
    stderr: float | None = None
    axis: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """What the number is about: a later record with the same key replaces an earlier one."""
        return self.step, self.eval, self.subset, self.metric, tuple(sorted(self.axis.items()))


#: Checks the types of a row of evals.jsonl.
_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of single documents, in a fixed order: summed nats, predicted tokens, their bytes; [documents]."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


class RunRecords:
    """The records of one run: one architecture, one seed."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """Directory of the training loop's checkpoints."""
        return self.path / "checkpoints"

    def write_info(self, info: dict[str, Any]) -> None:
        """Store run.json: name, seed, use, parameters, hash, status (running, finished or failed), message, ops.

        `device`, `precision` and `packages` are what it runs with, `before` lists others that its checkpoint came from.
        `ops` names the implementation of each op that ran, other than within compiled code.
        """
        _write_json(self.path / "run.json", info)

    def info(self) -> dict[str, Any]:
        """Return run.json, empty for a run that never started; raises DataError when it cannot be read."""
        return _read_json(self.path / "run.json") or {}

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row: step, tokens, train_loss, lr, grad_norm, tokens_per_s, seconds."""
        _append_lines(self.path / "metrics.jsonl", [row])

    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows in the order written, what was not finite as NaN; raises DataError for a damaged row."""
        rows = read_lines(self.path / "metrics.jsonl")
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]

    def append_evals(self, records: Iterable[Record]) -> None:
        """Append records; the documents of the step are written before, so that a listed step is complete."""
        _append_lines(self.path / "evals.jsonl", [dataclasses.asdict(record) for record in records])

    def evals(self) -> list[Record]:
        """Return all records; of two with the same key the later one. Raises DataError for a damaged row."""
        path = self.path / "evals.jsonl"
        records: dict[tuple, Record] = {}
        for number, row in enumerate(read_lines(path), start=1):
            if row.get("value", 0) is None:
                row["value"] = math.nan
            try:
                record = _RECORD.validate_python(row)
            except ValidationError as error:
                problem = error.errors()[0]
                where = f"{path}:{number} is damaged at {problem['loc'][0]!r}"
                raise DataError(f"{where} ({in_words(problem)}); mend or remove that line.") from error
            records[record.key] = record
        return list(records.values())

    def evaluated_steps(self, eval: str) -> list[int]:
        """Return the steps at which evaluation `eval` has records, ascending."""
        return sorted({record.step for record in self.evals() if record.eval == eval})

    def write_documents(self, eval: str, step: int, losses: dict[str, DocumentLosses]) -> None:
        """Store the losses of single documents per subset."""
        parts = list(losses.values())
        with replacing(self._documents_path(eval, step)) as file:
            np.savez_compressed(
                file,
                subsets=np.array(list(losses), dtype=np.str_),
                counts=np.array([len(part.nats) for part in parts], dtype=np.int64),
                nats=np.concatenate([np.empty(0), *(part.nats for part in parts)]),
                tokens=np.concatenate([np.empty(0, np.int64), *(part.tokens for part in parts)]),
                bytes=np.concatenate([np.empty(0, np.int64), *(part.bytes for part in parts)]),
            )

    def documents(self, eval: str, step: int) -> dict[str, DocumentLosses]:
        """Return the losses of single documents per subset; raises DataError when missing or damaged."""
        path = self._documents_path(eval, step)
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                ends = np.cumsum(file["counts"])[:-1]
                columns = [np.split(file[name], ends) for name in ("nats", "tokens", "bytes")]
                subsets = [str(name) for name in file["subsets"]]
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing; remove {self.path} to train it again.") from error
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); remove {self.path} to train it again.") from error
        return {name: DocumentLosses(*parts) for name, *parts in zip(subsets, *columns, strict=True)}

    def rewind(self, step: int) -> None:
        """Forget what was recorded after the checkpoint of `step`, whose evaluation comes after it, and cut-off lines.

        Files of other names than ours stay. Raises DataError for a damaged row, and when a file cannot be written.
        """
        for name, first in (("metrics.jsonl", step + 1), ("evals.jsonl", step)):
            path = self.path / name
            if path.exists():
                rows = read_lines(path)
                if not all(isinstance(row.get("step"), int) for row in rows):
                    raise DataError(f"{path} has a row without a step; mend or remove it.")
                rows = [row for row in rows if row["step"] < first]
                with replacing(path) as file:
                    file.write(_encode_lines(rows))
        for path in (self.path / "documents").glob("*.npz"):
            written = path.stem.rpartition("-")[2]
            if written.isdecimal() and int(written) >= step:
                path.unlink()

    def _documents_path(self, eval: str, step: int) -> Path:
        return self.path / "documents" / f"{safe_name(eval)}-{step}.npz"


class StudyRecords:
    """The records of one study: a directory."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @property
    def begun(self) -> bool:
        """Whether the directory holds a study."""
        return read(self.path / "study.yaml") is not None

    def refuse_foreign(self) -> None:
        """Raise ConfigError, DataError when the directory holds no study of ours but something else."""
        if self.begun:
            self.study()
        else:
            _refuse([path for path in entries(self.path) if path.name not in BEFORE and path.name[0] != "."])

    def refuse_foreign_report(self) -> None:
        """Raise ConfigError, DataError when a report written here would replace what basecap did not write."""
        if self.begun:
            self.study()
        elif _read_json(self.path / "results.json") is None:
            _refuse([path for path in entries(self.path) if path.name in ("report.html", "figures")])

    def refuse_loss(self, replaced_by: dict[str, Any] | None = None) -> None:
        """Raise DataError when results.json, to be `replaced_by` another analysis, is all that is left of its runs.

        Without another analysis runs are to begin here; those removed to be trained again leave a directory `runs`.
        """
        try:
            held, begins = _told(_read_json(self.path / "results.json")), replaced_by is None
        except (AttributeError, TypeError, DataError) as error:
            if self.runs():
                return  # it is made again from them
            raise DataError(f"{self.path / 'results.json'} is damaged; restore or remove it.") from error
        kept = not self.begun or ((self.path / "runs").is_dir() if begins else self.runs())
        if (held and not kept) or (not begins and held - _told(replaced_by)):
            what = f"{self.path / 'results.json'} has results that no records here give"
            raise DataError(f"{what}; restore runs, remove it or use another --out.")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running a study here; raises ConfigError when one does."""
        with contextlib.ExitStack() as held:
            with writing(self.path / "lock"):
                taken = f"another process is running this study in {self.path}; wait for it or give another --out."
                held.enter_context(locked(self.path, taken))
            yield

    def create(self, study: dict[str, Any]) -> None:
        """Make this the directory of `study`; raises ConfigError, DataError when it holds what is no study's."""
        self.refuse_foreign()
        text = yaml.safe_dump({"schema": SCHEMA, **_plain(study)}, sort_keys=False, allow_unicode=True).encode()
        if read(self.path / "study.yaml") != text:
            with replacing(self.path / "study.yaml") as file:
                file.write(text)

    def study(self) -> dict[str, Any]:
        """Return the resolved study; raises ConfigError when the directory holds none."""
        path = self.path / "study.yaml"
        text = read(path)
        if text is None:
            raise ConfigError(f"{self.path} holds no study: it has no study.yaml; give the --out of a run.")
        try:
            study = parse_yaml(text)
        except ValueError as error:
            raise DataError(f"{path} {error}; restore or remove it.") from error
        return _without_schema(study, path)

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Store versions and device that the study began with, and the hash of the data manifest."""
        _write_json(self.path / "environment.json", environment)

    def environment(self) -> dict[str, Any]:
        """Return what `write_environment` stored, empty when nothing was."""
        return _read_json(self.path / "environment.json") or {}

    def write_declarations(self, declarations: Iterable[Declaration]) -> None:
        """Store what the study's evaluations measure."""
        rows = [dataclasses.asdict(declaration) for declaration in declarations]
        _write_json(self.path / "declarations.json", {"declarations": rows})

    def declarations(self) -> dict[str, Declaration]:
        """Return the declarations by name, empty when none were stored."""
        path = self.path / "declarations.json"
        try:
            found = _read_json(path)
            rows = [] if found is None else found["declarations"]
            return {row["name"]: Declaration(**{**row, "axes": tuple(row["axes"])}) for row in rows}
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); restore or remove it.") from error

    def run(self, name: str, seed: int) -> RunRecords:
        """Return the records of one run; touches no file."""
        return RunRecords(self.path / "runs" / f"{safe_name(name)}-s{seed}")

    def runs(self) -> list[RunRecords]:
        """Return every run that has started, in the order of their directories."""
        found = [RunRecords(path) for path in entries(self.path / "runs")]
        return [run for run in found if run.info()]

    def write_results(self, results: dict[str, Any]) -> None:
        """Store the analysis."""
        _write_json(self.path / "results.json", results)

    def results(self) -> dict[str, Any]:
        """Return the analysis; raises DataError when there is none yet."""
        path = self.path / "results.json"
        results = _read_json(path)
        if results is None:
            raise DataError(f"{path} is missing; write it with: basecap report {self.path}")
        return results

    def write_report(self, page: str, figures: dict[str, str]) -> Path:
        """Store report.html and its figures by file name; return the path of the page."""
        files = {f"figures/{name}": figure for name, figure in figures.items()} | {"report.html": page}
        for name, content in files.items():
            with replacing(self.path / name) as file:
                file.write(content.encode())
        return self.path / "report.html"


def safe_name(name: str) -> str:
    """Return a file name for `name`: itself where that is safe, else its readable part and a hash.

    >>> safe_name("transformer++")
    'transformer++'
    >>> safe_name("transformer++ window")
    'transformer++_window-539d50'
    """
    safe = re.sub(r"[^A-Za-z0-9+,=._-]+", "_", name).lstrip(".")[:80]
    if safe == name and safe:
        return name
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _refuse(foreign: Sequence[Path]) -> None:
    if foreign:
        raise ConfigError(f"{foreign[0]} was not written by basecap; give another --out or move it away.")


def _told(results: dict[str, Any] | None) -> set[str]:
    """Return which of checkpoints and held-out documents an analysis tells of."""
    return {key for study in (results or {}).get("studies", []) for key in ("points", "documents") if study.get(key)}


def _plain(value: Any) -> Any:
    """Return `value` as JSON knows it: numpy scalars and tuples as numbers and lists, non-finite as None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def _encode_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(_plain(row), allow_nan=False).encode() + b"\n" for row in rows)


def _append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with writing(path), path.open("ab") as file:
        file.write(_encode_lines(rows))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, **_plain(content)}, indent=1, allow_nan=False, ensure_ascii=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that `_write_json` wrote, None when there is no such file."""
    text = read(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON; restore or remove it.") from error
    return _without_schema(content, path)


def _without_schema(content: Any, path: Path) -> dict[str, Any]:
    """Return `content` without its `schema`; raises DataError when this version cannot read it."""
    found = content.pop("schema", None) if isinstance(content, dict) else None
    if found is None:
        raise DataError(f"{path} was not written by basecap; give another directory.")
    if found != SCHEMA:
        raise DataError(
            f"{path} has schema {found}, this version of basecap reads {SCHEMA}; use the one that wrote it."
        )
    return content

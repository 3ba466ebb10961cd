"""The records of one run: what it is, how it went, and what was measured. `basecap.records.study` lists the files."""

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from basecap.errors import DataError, LostDirectory
from basecap.options import damaged
from basecap.records.documents import DocumentLosses, History, append_losses, forget_losses, read_losses
from basecap.records.maps import Maps, read_last, write_maps
from basecap.records.measured import Record
from basecap.system.files import (
    append_lines,
    encode_lines,
    fsync_files,
    read_array,
    read_json,
    read_last_lines,
    read_lines,
    remove_partial,
    replacing,
    safe_name,
    write_json,
    writing,
)
from basecap.system.foreign import refuse_link
from basecap.system.place import Place

#: How far a run is; an imported model was trained elsewhere.
Status = Literal["running", "finished", "failed", "imported"]

#: Records of earlier versions may have null for nothing, and under `seconds` one number.
_Before = BeforeValidator(lambda value: () if value is None else value)
_Plugins = BeforeValidator(lambda value: {} if value is None else value)
_Seconds = BeforeValidator(lambda value: {} if isinstance(value, int | float) else value)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run was trained on: device, "fp32" or "bf16", the version of each package, threads of a CPU, processes.

    `mesh` is empty for one process, else it has "parallel" ("ddp" or "fsdp"), "replicate" (copies of the model) and
    "shard" (processes that hold one copy between them). `deterministic` is what train.deterministic set.
    """

    device: str | None = None
    precision: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    mesh: dict[str, Any] = field(default_factory=dict)
    deterministic: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunInfo(Machine):
    """The content of run.json; the machine is that of the last process. Archived files may lack what has a default.

    Attributes:
        name: of the run, as in tables.
        seed: of the run.
        use: the registered architecture.
        status: how far it is.
        message: why it failed, else empty.
        architecture: name of its entry in the study, in a study of tasks.
        task: its training task, in a study of tasks.
        lr: the learning rate.
        schedule: of the learning rate.
        tokens: of training, None where they were not recorded.
        branches: tokens at the ends of its branches, None where they were not recorded.
        hash: of everything that the run depends on.
        plugins: the plugin files and packages that its model needs, by their digests.
        before: the machines of the processes before the last, in order.
        ops: the implementation of each op that ran outside compiled code.
        diverged: whether it failed because training could not continue, as with a loss that is not finite.
        traceback: of an unexpected error.
        parameters: of the model, once finished.
        state_bytes: of the decoding state of one sequence in float32, once finished.
        seconds: time of its parts, see `basecap.train.wall_time`, over all processes that ended with a checkpoint or
            at its end.
        passes: how often it reads its training text: its tokens divided by those of the text; None for tasks.
        proof: what was proved of a mixer from a plugin before it trained: settings, layers, what was not proved.
        leak_test: what the leak test of the trained model found, see `basecap.testing.trained_model`.
        stopped: the step after which train.stop_at ended it, None for a run of full length.
        cuda_graphs: what of its steps was replayed as CUDA graphs: "step", "gradients" (all but the update), or
            "none: " with the reason; None where none was asked for, and for a run of few steps.
        origin: of an imported model: its "folder", a hash of its "weights", and whose "tokenizer" it has, that of the
            "study" or its "own".
    """

    __pydantic_config__ = ConfigDict(defer_build=True)

    name: str
    seed: int
    use: str
    status: Status
    message: str
    architecture: str | None = None
    task: str | None = None
    lr: float | None = None
    schedule: str | None = None
    tokens: int | None = None
    branches: tuple[int, ...] | None = None
    hash: str | None = None
    plugins: Annotated[dict[str, str], _Plugins] = field(default_factory=dict)
    before: Annotated[tuple[Machine, ...], _Before] = ()
    ops: dict[str, str] = field(default_factory=dict)
    diverged: bool = False
    traceback: str | None = None
    parameters: int | None = None
    state_bytes: int | None = None
    seconds: Annotated[dict[str, float], _Seconds] = field(default_factory=dict)
    passes: float | None = None
    proof: dict[str, Any] = field(default_factory=dict)
    leak_test: dict[str, Any] = field(default_factory=dict)
    stopped: int | None = None
    cuda_graphs: str | None = None
    origin: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the run is at its end."""
        return self.status == "finished"

    @property
    def imported(self) -> bool:
        """Whether it is a model that was trained elsewhere."""
        return self.status == "imported"

    @property
    def series(self) -> str:
        """Name of its entry in the study; a run is named after its task too where a study has many tasks."""
        return self.architecture or self.name

    @property
    def machine(self) -> Machine:
        """What the last process ran on."""
        return Machine(**{item.name: getattr(self, item.name) for item in fields(Machine)})

    def failed(self, message: str, traceback: str | None = None) -> "RunInfo":
        """Return the info of this run after it failed."""
        return replace(self, status="failed", message=message, traceback=traceback)

    def row(self) -> dict[str, Any]:
        """Return the content of run.json, without the keys that are empty."""
        row = asdict(self) | {"before": [_without_empty(asdict(machine)) for machine in self.before]}
        return _without_empty(row)


def _without_empty(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not (value is None or value is False or value in ({}, []))}


_INFO = TypeAdapter(RunInfo)
_RECORDS = TypeAdapter(list[Record])


class RunRecords:
    """The records of one run: one architecture, one seed."""

    def __init__(self, path: Path, place: Place | None = None):
        """Take its directory, and that of its study where a command works in it: every write looks for it there."""
        self.path = Path(path)
        self.place = place

    def refuse_left(self) -> None:
        """Raise LostDirectory when the study's directory was moved, removed or replaced since the command began.

        So it does when another process took over the run.
        """
        if self.place is not None:
            self.place.refuse_left()

    def flush(self) -> None:
        """Flush the files of the run to the disk; raises LostDirectory, as `refuse_left` does."""
        self.refuse_left()
        with writing(self.path / "metrics.jsonl"):
            fsync_files(self.path)

    @property
    def left(self) -> bool:
        """Whether that is so."""
        return self.place is not None and self.place.left

    def followed(self) -> tuple["RunRecords", str]:
        """Return the records of this run where the study's directory is now, and words that say where that is.

        Raises LostDirectory when it is gone.
        """
        assert self.place is not None
        before, found = self.place.directory, self.place.found()
        if found is None:
            raise LostDirectory(f"{before} was removed or replaced while it was in use; no checkpoint can be written.")
        return RunRecords(found / self.path.relative_to(before)), self.place.whereabouts(found)

    @property
    def study(self) -> Path:
        """Directory of the study that the run is part of."""
        return Path(os.path.normpath(self.path / ".." / ".."))  # `parent` of a path such as . is none

    @property
    def resume(self) -> Path:
        """Directory of the checkpoints that the run resumes from."""
        return self.path / "resume"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json of an imported model."""
        return self.path / "tokenizer.json"

    @property
    def weights(self) -> Path:
        """Directory of the weights kept for later evaluations."""
        return self.path / "weights"

    def write_info(self, info: RunInfo) -> None:
        """Write run.json, that of a finished run once all else is on the disk; raises LostDirectory, as all writing."""
        if info.finished:
            self.flush()
        self.refuse_left()
        write_json(self.path / "run.json", info.row())

    def info(self) -> RunInfo | None:
        """Return run.json, None for a run that never started; raises DataError when it is damaged."""
        path = self.path / "run.json"
        content = read_json(path)
        if content is None:
            return None
        try:
            return _INFO.validate_python(content)
        except ValidationError as error:
            raise damaged(path, error) from error

    @property
    def finished(self) -> bool:
        """Whether the run, or branch of a run, is at its end; raises DataError when that cannot be read."""
        return (read_json(self.path / "run.json") or {}).get("status") == "finished"

    @property
    def budget(self) -> int | None:
        """Tokens of its training, None where they were not recorded; raises DataError when that cannot be read."""
        return (read_json(self.path / "run.json") or {}).get("tokens")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row: step, tokens, train_loss, lr, grad_norm, tokens_per_s, seconds."""
        self.refuse_left()
        append_lines(self.path / "metrics.jsonl", [row])

    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows in order, with NaN for numbers that were not finite; raises DataError for a damaged row."""
        rows = read_lines(self.path / "metrics.jsonl")
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]

    def last_metrics(self, count: int) -> list[dict[str, Any]]:
        """Return at most `count` of the last rows as they are stored, without reading the others."""
        return read_last_lines(self.path / "metrics.jsonl", count)

    def append_evals(self, records: Iterable[Record]) -> None:
        """Append records. Write the documents of the step first, so that a step in evals.jsonl is complete."""
        self.refuse_left()
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
            raise damaged(path, error, rows=True, remedy="fix or remove that line") from error

    def add_unmeasured(self, eval: str) -> None:
        """Record that evaluation `eval` does not apply to this model."""
        self.refuse_left()
        write_json(self.path / "unmeasured.json", {"evaluations": sorted({*self.unmeasured(), eval})})

    def unmeasured(self) -> list[str]:
        """Return the evaluations that do not apply to this model."""
        return (read_json(self.path / "unmeasured.json") or {}).get("evaluations", [])

    def append_documents(self, eval: str, step: int, losses: dict[str, DocumentLosses]) -> None:
        """Append the losses of single documents by subset; raises DataError when they cannot be written."""
        self.refuse_left()
        refuse_link(self.path / "documents")
        append_losses(self._documents_path(eval), step, losses)

    def documents(self, eval: str, steps: Iterable[int]) -> list[History]:
        """Return the losses of single documents at `steps`; raises DataError where some are missing or damaged."""
        return read_losses(self._documents_path(eval), steps)

    def write_maps(self, eval: str, step: int, maps: Maps) -> None:
        """Write the maps of an evaluation at a step."""
        self.refuse_left()
        refuse_link(self.path / "maps")
        write_maps(self.path / "maps" / f"{safe_name(eval)}-{step}.npz", maps)

    def maps(self) -> dict[str, Maps]:
        """Return the last maps of each evaluation; raises DataError for a damaged file."""
        return read_last(self._maps)

    def rewind(self, step: int) -> None:
        """Remove everything recorded after the checkpoint of `step`, including the evaluation at that step.

        It also removes the temporary files of a killed process, and keeps those of other programs. Raises DataError for
        a damaged row, and when a file cannot be written.
        """
        self.refuse_left()
        remove_partial(self.path)
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

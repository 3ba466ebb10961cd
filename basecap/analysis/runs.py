"""The records of a study's runs, read once, and what every report says of them, whatever they were trained on."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from basecap.analysis.results import (
    IN_PART,
    UNPROVED,
    AnswerRow,
    CurvePoint,
    EvaluationResults,
    EvaluationRow,
    Failure,
    RunRow,
    SweepRow,
)
from basecap.analysis.rows import finite
from basecap.analysis.study_files import EnvironmentFile, parse
from basecap.analysis.tasks.shares import Share, wilson
from basecap.analysis.training_log import TrainingLog
from basecap.errors import DataError
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.records.branches import finished_branches
from basecap.records.measured import ANSWERS, Record
from basecap.train.wall_time import shares

#: Points of a drawn training curve, spread evenly over the logarithm of the steps.
CURVE_POINTS = 300


@dataclass(frozen=True)
class Run:
    """The records of a run but its documents, read once.

    `branches` are those of a run with schedule wsd. Its `evals` are theirs alone, as its own are at rates that have not
    decayed; its `log` is that of the trunk.
    """

    records: RunRecords
    info: RunInfo
    log: TrainingLog
    evals: list[Record]
    branches: tuple["Run", ...] = ()

    @property
    def measured(self) -> tuple["Run", ...]:
        """The records that have the evaluation points: the branches, or for other schedules the run itself."""
        return self.branches if self.info.schedule == "wsd" else (self,)

    @classmethod
    def read(cls, records: RunRecords, study: StudyRecords, names: Sequence[str]) -> "Run":
        """Read all but the documents; raises DataError, also for a run whose architecture is not among `names`."""
        path, info = records.path / "run.json", records.info()
        if info is None:  # it was removed since the directory was listed
            raise DataError(f"{path} does not exist; restore it, or remove its directory.")
        if info.name not in names:
            raise DataError(f"{path} belongs to {info.name!r}, which is not in the study; remove its directory.")
        study.refuse_misplaced(records, info)  # a copy would be read in place of the run itself
        log = TrainingLog.read(records)
        if info.schedule != "wsd":
            return cls(records=records, info=info, log=log, evals=records.evals())
        found = finished_branches(records)
        branches = tuple(cls(part, info, TrainingLog.read(part), part.evals()) for part in found)
        return cls(records, info, log, [record for part in branches for record in part.evals], branches)

    def failure(self, message: str) -> Failure:
        """Return the row that says what is wrong with this run."""
        return Failure(name=self.info.name, seed=self.info.seed, message=message)


def read_runs(records: StudyRecords, names: Sequence[str]) -> list[Run]:
    """Read the runs of a study in the order of `names`, then of seeds; raises DataError as `Run.read`."""
    runs = [Run.read(found, records, names) for found in records.runs()]
    return sorted(runs, key=lambda run: (names.index(run.info.name), run.info.seed))


def describe_all(runs: Sequence[Run], records: StudyRecords) -> list[RunRow]:
    """Return the rows of runs. Without its training log, the tokens of one are those at its last evaluation point."""
    allowed = _environment(records).allowed_unproved
    return [_describe(run, allowed) for run in runs]


def _describe(run: Run, allowed: Collection[str]) -> RunRow:
    info, log = run.info, run.log
    return RunRow(
        name=info.name,
        seed=info.seed,
        use=info.use,
        machines=_machines(info),
        status=info.status,
        leak_test=_leak_test(info, allowed),
        parameters=info.parameters,
        state_bytes=info.state_bytes,
        seconds=finite(sum(log.seconds.tolist())) if len(log) else None,
        passes=info.passes,
        evaluating=shares([info.seconds]).get("evaluations"),
        tokens=int(log.tokens[-1]) if len(log) else max((record.tokens for record in run.evals), default=0),
        tokens_per_s=finite(float(np.median(log.tokens_per_s))) if len(log) else None,
    )


def _leak_test(info: RunInfo, allowed: Collection[str]) -> str | None:
    """Return the word on the leak test of a run: earlier versions ran no such test.

    What did not fit into it is not proved. The test suite proves built-in architectures; others have a verdict where
    the user allows it.
    """
    if info.task is not None or not info.finished:
        return None
    if not info.leak_test:
        return "not run"
    if leaks := info.leak_test.get("leaks"):
        return str(leaks)
    untested = "; ".join(info.leak_test.get("untested", []))
    if not untested:
        return "passed"
    if not info.plugins:
        return f"{IN_PART}{untested}"
    if info.series in allowed:
        return f"{IN_PART}{untested}; it has a verdict as --allow-unproved says"
    return f"{UNPROVED}{untested}; only --allow-unproved gives it a verdict"


def _machines(info: RunInfo) -> list[str]:
    """Return the machines that a run was trained on, one after the other, as "NVIDIA H200, bf16"."""
    named = [f"{found.device}, {found.precision}" for found in (*info.before, info) if found.device]
    return list(dict.fromkeys(named))


def curve(run: Run) -> list[CurvePoint]:
    """Return the training loss as means over stretches of steps that are even on a logarithmic axis."""
    losses = run.log.loss
    if not len(losses):
        return []
    edges = np.unique(np.geomspace(1, len(losses) + 1, CURVE_POINTS + 1).round().astype(int) - 1).tolist()
    return [
        CurvePoint(
            name=run.info.name,
            seed=run.info.seed,
            tokens=int(run.log.tokens[end - 1]),
            loss=finite(float(np.add.reduce(losses[start:end])) / (end - start)),
        )
        for start, end in itertools.pairwise(edges)
    ]


def evaluations(records: StudyRecords, runs: Sequence[Run], without: str) -> list[EvaluationResults]:
    """Return every declared evaluation but `without`, the study's main one: rows of each run's last checkpoint."""
    found = []
    for name, declaration in records.declarations().items():
        if name == without:
            continue
        rows: list[EvaluationRow] = []
        for run in runs:
            own = [record for record in run.evals if record.eval == name]
            last = max((record.step for record in own), default=0)
            info, kept = run.info, [record for record in own if record.step == last]
            for record in kept:
                values = vars(record) | {"value": finite(record.value), "stderr": finite(record.stderr)}
                values |= {"name": info.name, "seed": info.seed}
                if (record.unit or declaration.unit) == ANSWERS and values["value"] is not None:
                    low, high = wilson(Share(record.value, record.n))
                    rows.append(AnswerRow(**values, low=low, high=high))
                else:
                    rows.append(EvaluationRow(**values))
        found.append(
            EvaluationResults(
                name=declaration.name,
                unit=declaration.unit,
                better=declaration.better,
                axes=list(declaration.axes),
                rows=rows,
            )
        )
    return found


def failed_checks(records: StudyRecords) -> dict[str, str]:
    """Return which architectures failed checks before they trained, and which ones."""
    return _environment(records).failed_checks


def _environment(records: StudyRecords) -> EnvironmentFile:
    return parse(records.environment(), EnvironmentFile, records.path / "environment.json")


def sweeps(records: StudyRecords) -> list[SweepRow]:
    """Return the learning rates that were tried for each architecture."""
    return [SweepRow(**asdict(sweep), at_edge=sweep.at_edge) for sweep in records.sweeps()]

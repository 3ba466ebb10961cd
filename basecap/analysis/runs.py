"""What the runs of a study left, read once, and what any report says of them, whatever they were trained on."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from basecap.analysis.files import Metrics, RunFile, complete
from basecap.errors import DataError
from basecap.records import Record, RunRecords, StudyRecords

#: Points of a drawn training curve, spread evenly over the logarithm of the steps.
CURVE_POINTS = 300


@dataclass(frozen=True)
class Run:
    """What a run left, read once."""

    records: RunRecords
    info: dict[str, Any]
    metrics: list[dict[str, Any]]
    evals: list[Record]

    @classmethod
    def read(cls, records: RunRecords, study: StudyRecords, names: Sequence[str]) -> "Run":
        """Read all but the documents; raises DataError, also for what is no run of an architecture among `names`."""
        path = records.path / "run.json"
        info = complete(records.info(), RunFile, path)
        if info["name"] not in names:
            raise DataError(f"{path} is of {info['name']!r}, which the study has not; remove its directory.")
        place = study.run(info["name"], info["seed"]).path
        if records.path.name != place.name:  # a copy set aside would take the place of the run itself
            raise DataError(f"{path} is of the run that belongs in {place}; move {records.path} out of the study.")
        metrics = records.metrics()
        for number, row in enumerate(metrics, start=1):
            complete(row, Metrics, f"{records.path / 'metrics.jsonl'}:{number}")
        return cls(records=records, info=info, metrics=metrics, evals=records.evals())

    @property
    def label(self) -> dict[str, Any]:
        """Which architecture and seed it is, as every row says."""
        return {"name": self.info["name"], "seed": self.info["seed"]}


def describe(run: Run) -> dict[str, Any]:
    """Return what the table of runs says of one."""
    rates = [row["tokens_per_s"] for row in run.metrics]
    return run.label | {
        "use": run.info["use"],
        "machines": _machines(run.info),
        "status": run.info["status"],
        "parameters": run.info.get("parameters"),
        "seconds": sum(row["seconds"] for row in run.metrics) if run.metrics else None,
        "tokens": run.metrics[-1]["tokens"] if run.metrics else 0,
        "tokens_per_s": float(np.median(rates)) if rates else None,
    }


def _machines(info: dict[str, Any]) -> list[str]:
    """Return what a run was trained on, one after the other, as "NVIDIA H200, bf16"."""
    every = [*(info.get("before") or []), info]
    named = [f"{machine['device']}, {machine['precision']}" for machine in every if machine.get("device")]
    return list(dict.fromkeys(named))


def curve(run: Run) -> list[dict[str, Any]]:
    """Thin the training loss out to means over stretches that are even on a logarithmic axis."""
    if not run.metrics:
        return []
    losses = np.array([row["train_loss"] for row in run.metrics])
    edges = np.unique(np.geomspace(1, len(losses) + 1, CURVE_POINTS + 1).round().astype(int) - 1).tolist()
    return [
        run.label | {"tokens": run.metrics[end - 1]["tokens"], "loss": float(losses[start:end].mean())}
        for start, end in itertools.pairwise(edges)
    ]


def evaluations(records: StudyRecords, runs: Sequence[Run], without: str) -> list[dict[str, Any]]:
    """Return every declared evaluation but the one that the study is about: rows of each run's last checkpoint."""
    found = []
    for name, declaration in records.declarations().items():
        rows = []
        for run in runs:
            own = [record for record in run.evals if record.eval == name]
            last = max((record.step for record in own), default=0)
            rows += [run.label | asdict(record) for record in own if record.step == last]
        if name != without:
            found.append(asdict(declaration) | {"axes": list(declaration.axes), "rows": rows})
    return found

"""How far a study is, from its records alone, while it runs here or elsewhere or after it has ended."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from basecap.records.run import RunInfo, RunRecords
from basecap.records.study import StudyRecords

#: The last rows of a run's metrics that its rate is the median of.
ROWS = 50

#: What a run does. One that is `stopped` has started, and no process trains it.
State = Literal["finished", "training", "stopped", "failed", "waiting", "imported"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far one run is.

    Attributes:
        name: of the run, with the learning rate in a sweep.
        seed: of the run.
        state: what it does.
        tokens: that it has trained.
        total: tokens that it will have trained.
        loss: of the last step, in nats per token.
        rate: tokens per second, the median of its last steps.
        message: why it failed, else empty.
    """

    name: str
    seed: int
    state: State
    tokens: int = 0
    total: int | None = None
    loss: float | None = None
    rate: float | None = None
    message: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Seconds that its steps will still take, without evaluations; None while unknown."""
        if self.state in ("finished", "failed") or self.total is None or not self.rate:
            return None
        return max(0, self.total - self.tokens) / self.rate


def study_status(records: StudyRecords) -> list[RunStatus]:
    """Return the runs of a study, those of sweeps first, and those that have not started last.

    Raises:
        ConfigError: the directory holds no study.
        DataError: a record is damaged.
    """
    study = records.study()
    found = [
        _status(records, run, info, sweep)
        for sweep in (True, False)
        for run in records.runs(sweep=sweep)
        if (info := run.info()) is not None
    ]
    started = {(status.name, status.seed) for status in found}
    total = study.get("train", {}).get("tokens")
    waiting = [
        RunStatus(name=name, seed=seed, state="waiting", total=total)
        for name, seed in _planned(study)
        if (name, seed) not in started
    ]
    return found + waiting


def time_left(runs: Sequence[RunStatus]) -> float | None:
    """Return the seconds until all runs are at their ends if as many train at a time as now; None while unknown.

    A run that has no rate counts with the median of those that have one.
    """
    rates = [run.rate for run in runs if run.rate]
    width = sum(run.state == "training" for run in runs)
    left = [run for run in runs if run.state in ("training", "stopped", "waiting")]
    if not rates or not width or any(run.total is None for run in left):
        return None
    usual = statistics.median(rates)
    seconds = [((run.total or 0) - run.tokens) / (run.rate or usual) for run in left]
    return max(sum(seconds) / width, max(seconds))


def _status(records: StudyRecords, run: RunRecords, info: RunInfo, sweep: bool) -> RunStatus:
    rows = run.last_metrics(ROWS)
    last = rows[-1] if rows else {}
    tokens = last.get("tokens", 0)
    rates = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
    state: State = "training" if info.status == "running" else info.status
    if state == "training" and not records.is_claimed(run):
        state = "stopped"
    return RunStatus(
        name=f"{info.name} (lr {info.lr:g})" if sweep and info.lr is not None else info.name,
        seed=info.seed,
        state=state,
        tokens=tokens,
        total=info.tokens and max(tokens, info.tokens),  # the last step may go beyond what was asked for
        loss=last.get("train_loss"),
        rate=statistics.median(rates) if rates else None,
        message=info.message,
    )


def _planned(study: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield name and seed of the runs that a resolved study has once its sweeps have chosen."""
    tasks = (study.get("task") or {}).get("train") or {}
    for entry in study.get("architectures", ()):
        own = (study.get("reference_seeds") or study["seeds"]) if entry["name"] == study.get("reference") else None
        trained = [task for task in tasks if entry.get("tasks") is None or task in entry["tasks"]]
        names = [f"{entry['name']} on {task}" for task in trained] if len(tasks) > 1 else [entry["name"]]
        for name in names:
            yield from ((name, seed) for seed in own or study["seeds"])

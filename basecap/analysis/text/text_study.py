"""The analysis of a study of text: the gaps of its architectures, and the data behind them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from pydantic import BaseModel

from basecap.analysis.results import DocumentCount, Failure, Overlap, Point, PointLosses, RunRow, TextResults
from basecap.analysis.rows import LEVEL, Row, finite, grouped
from basecap.analysis.runs import (
    Run,
    curve,
    describe_all,
    evaluations,
    failed_checks,
    read_runs,
    sweeps,
)
from basecap.analysis.sequential import AddedRuns, Looks, Tables, added_runs
from basecap.analysis.study_files import TextStudyFile, parse
from basecap.analysis.text.draws import Runs, few_clusters
from basecap.analysis.text.imported import imported_rows
from basecap.analysis.text.leaking import compare_sound, leaks_of
from basecap.analysis.text.losses import EVALUATION, joined, load
from basecap.analysis.text.measured import Setting
from basecap.analysis.text.noise import enough_draws
from basecap.errors import DataError
from basecap.records import StudyRecords
from basecap.records.measured import Record


class _Environment(BaseModel):
    """The keys that are read in environment.json, and the rest, which the report prints."""

    bigram_loss: float
    overlap: list[Overlap] = []
    text_note: str | None = None
    rest: dict[str, Any]


def analyse_text(records: StudyRecords) -> TextResults:
    """Analyse a study of text; raises DataError for records that cannot be read."""
    settings = records.study()
    study = parse(settings, TextStudyFile, records.path / "study.yaml")
    train, ood = study.data.train, study.data.ood
    names = [entry.name for entry in study.architectures]
    runs = read_runs(records, names)
    ran = {run.info.name for run in runs}
    losses, failures = _load(runs, (*train, *ood))
    environment, looks = _environment(records), Looks.read(records)
    described = describe_all(runs, records)
    level = looks.level(LEVEL) if looks else LEVEL
    setting = Setting(
        reference=study.reference,
        train=train,
        ood=ood,
        share=study.gap.share,
        cost=study.gap.cost,
        level=level,
        draws=enough_draws(level),
        bigram=environment.bigram_loss,
        waiting=study.reference not in ran,
        failed={run.info.name for run in runs if run.info.status == "failed"},
        seconds=_seconds(described),
    )
    others = [name for name in names if name != study.reference and name in ran]
    compared = compare_sound(others, losses, setting, leaks_of(described))
    return TextResults(
        name=study.name,
        names=names,
        scale=study.scale,
        summary=study.summary,
        reference=study.reference,
        cost=setting.cost,
        share=setting.share,
        confidence=1 - LEVEL,
        level=setting.level,
        looks=looks,
        added=None if looks else _added(records, study, compared.rows),
        resamples=setting.resamples,
        train_domains=train,
        ood_domains=ood,
        few_clusters=few_clusters(next(iter(losses.values())), (*train, *ood)) if losses else [],
        controls=[entry.name for entry in study.architectures if entry.control],
        comparisons=compared.rows,
        maturity=compared.maturity,
        runs=described,
        points=[point for run in runs for part in run.measured for point in _points(part, train)],
        curves=[point for run in runs for point in curve(run)],
        documents=_documents(losses),
        evaluations=evaluations(records, runs, without=EVALUATION),
        failures=failures,
        sweep=sweeps(records),
        overlap=environment.overlap,
        text_note=environment.text_note,
        settings=settings,
        environment=environment.rest,
        failed_checks=failed_checks(records),
        imported=imported_rows(records),
    )


def record_table(records: StudyRecords, results: TextResults) -> None:
    """Record that a table of a study was made at its present plan, where it has a gap that anybody could have seen.

    Raises DataError when it cannot be written.
    """
    if all(row.gap is None for row in results.comparisons):
        return
    tables = Tables.read(records)
    study = parse(results.settings, TextStudyFile, records.path / "study.yaml")
    seen = tables.seen(_plan(study))
    if seen != tables:
        records.write_tables(seen.model_dump(mode="json"))


def _added(records: StudyRecords, study: TextStudyFile, rows: Sequence[Row]) -> AddedRuns | None:
    compared = {(row.name, seed) for row in rows if row.gap is not None for seed in row.seeds}
    compared |= {(study.reference, seed) for row in rows if row.gap is not None for seed in row.reference_seeds}
    return added_runs(Tables.read(records), _plan(study), compared, LEVEL)


def _plan(study: TextStudyFile) -> dict[str, list[int]]:
    """Return the seeds of each architecture that a study plans."""
    own = study.seeds if study.reference_seeds is None else study.reference_seeds
    return {entry.name: own if entry.name == study.reference else study.seeds for entry in study.architectures}


def _environment(records: StudyRecords) -> _Environment:
    found = records.environment()
    path = records.path / "environment.json"
    if not isinstance(found.get("bigram_loss"), int | float):
        raise DataError(f"{path} does not hold the loss of a bigram model; run the study again, which writes it.")
    rest = {key: value for key, value in found.items() if key not in ("overlap", "text_note")}
    return parse(found | {"rest": rest}, _Environment, path)


def _seconds(described: Sequence[RunRow]) -> dict[str, float]:
    """Return the median training time of finished runs by architecture."""
    times: dict[str, list[float]] = {}
    for run in described:
        if run.status == "finished" and run.seconds is not None:
            times.setdefault(run.name, []).append(run.seconds)
    return {name: float(np.median(found)) for name, found in times.items()}


def _load(runs: Sequence[Run], domains: Sequence[str]) -> tuple[Runs, list[Failure]]:
    """Read the losses of the runs that can be compared; return also which runs failed or cannot be read."""
    losses, failures = {}, []
    for run in runs:
        if run.info.status == "failed":
            failures.append(run.failure(run.info.message))
        try:
            parts = [load(part.records, part.evals, part.log, domains) for part in run.measured]
            found = joined([part for part in parts if part is not None])
        except DataError as error:
            failures.append(run.failure(str(error)))
            continue
        if found is not None:
            losses[run.info.name, run.info.seed] = found
    return losses, failures


def _points(run: Run, train: Sequence[str]) -> list[Point]:
    """Return the run's evaluation points."""
    own = (record for record in run.evals if record.eval == EVALUATION)
    checkpoints = grouped(own, attrgetter("step"))
    steps = sorted(checkpoints)
    training = run.log.smoothed_loss(steps).tolist()
    return [_point(run, checkpoints[step], loss, train) for step, loss in zip(steps, training, strict=True)]


def _point(run: Run, records: Sequence[Record], training: float, train: Sequence[str]) -> Point:
    """Return the evaluation point that `records` are of."""
    losses: dict[str, float | None] = {}
    bits: dict[str, float | None] = {}
    nats, tokens = 0.0, 0
    for record in records:
        domain, value = record.subset, finite(record.value)
        if record.metric == "bits_per_byte":
            bits[domain] = value
        elif record.metric == "loss":
            losses[domain] = value
            if domain in train:
                nats += record.value * record.n
                tokens += record.n
    return Point(
        name=run.info.name,
        seed=run.info.seed,
        step=records[0].step,
        tokens=records[0].tokens,
        training=finite(training),
        held_out=finite(nats / tokens) if tokens else None,
        domains={name: PointLosses(loss=losses.get(name), bits_per_byte=bits.get(name)) for name in {**losses, **bits}},
    )


def _documents(losses: Runs) -> list[DocumentCount]:
    first = next(iter(losses.values()), None)
    return [
        DocumentCount(
            domain=domain,
            documents=len(found.tokens),
            tokens=int(found.tokens.sum()),
            bytes=int(found.bytes.sum()),
        )
        for domain, found in (first.domains if first else {}).items()
    ]

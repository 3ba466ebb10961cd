"""From records to results.json: every number that the report shows."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from basecap.analysis.comparison import Setting, compare_runs
from basecap.analysis.draws import Runs, few_clusters
from basecap.analysis.files import GapSection, StudyFile, complete
from basecap.analysis.losses import EVALUATION, load, smoothed_training_loss
from basecap.analysis.noise import enough_draws
from basecap.analysis.recall import analyse_tasks
from basecap.analysis.runs import Run, curve, describe, evaluations
from basecap.analysis.sequential import Looks
from basecap.errors import DataError
from basecap.records import Record, StudyRecords

#: Draws of documents behind every interval.
RESAMPLES = 2000
#: Seed of the draws: the same records give the same results.
DRAW_SEED = 2025
#: Probability that the intervals of a table leave out something true, over all looks at the study.
LEVEL = 0.05


def analyse(study_dirs: Sequence[Path]) -> dict[str, Any]:
    """Analyse studies, each for itself.

    Returns:
        {"studies": [...]}, plain numbers and text. A study of tasks holds what `recall.analyse_tasks` says. One of text
        holds kind ("text"), name, names (of architectures), scale (None where it has one size), summary, reference,
        cost, from, confidence (over all looks), level (of the intervals), looks (see `sequential.Looks`; None where
        there was only one), resamples, train_domains, ood_domains, few_clusters (domains of too few to draw);
        `comparisons` (a row per architecture but the reference, see `rows.Row`); `runs`, `points` (a row per evaluated
        checkpoint), `curves` (smoothed training loss), `documents` (what was held out per domain), `evaluations` (any
        other declared evaluation with its rows), `failures`, `sweep` (learning rates tried and chosen per
        architecture), `overlap` (how much of a domain's held-out text stands in the training text, documents left
        out), text_note (what to know of the text, None where nothing), `settings` (the resolved study) and
        `environment`.

    Raises:
        ConfigError: a directory that holds no study.
        DataError: records that cannot be read.
    """
    return {"studies": [_analyse_study(StudyRecords(Path(path))) for path in study_dirs]}


def _analyse_study(records: StudyRecords) -> dict[str, Any]:
    return analyse_tasks(records) if records.study().get("task") else _analyse_text(records)


def _analyse_text(records: StudyRecords) -> dict[str, Any]:
    study = complete(records.study(), StudyFile, records.path / "study.yaml")
    train, ood = list(study["data"]["train"]), list(study["data"]["ood"])
    names = [entry["name"] for entry in study["architectures"]]
    runs = [Run.read(found, records, names) for found in records.runs()]
    runs.sort(key=lambda run: (names.index(run.info["name"]), run.info["seed"]))
    losses, failures = _load(runs, (*train, *ood))
    environment = records.environment()
    gap = GapSection.model_validate(study["gap"])
    described = [describe(run) for run in runs]
    looks = Looks.read(records)
    level = looks.level(LEVEL) if looks else LEVEL
    setting = Setting(
        reference=study["reference"],
        train=train,
        ood=ood,
        share=gap.share,
        cost=gap.cost,
        level=level,
        resamples=RESAMPLES,
        draws=enough_draws(level),
        bigram=_bigram_loss(records, environment),
        waiting=set(names) - {run.info["name"] for run in runs},
        seconds=_seconds(described),
    )
    others = [name for name in names if name != study["reference"]]
    return {
        "kind": "text",
        "name": study["name"],
        "names": names,
        "scale": study.get("scale"),
        "summary": study.get("summary", ""),
        "reference": study["reference"],
        "cost": setting.cost,
        "from": setting.share,
        "confidence": 1 - LEVEL,
        "level": setting.level,
        "looks": looks.model_dump(mode="json") if looks else None,
        "resamples": RESAMPLES,
        "train_domains": train,
        "ood_domains": ood,
        "few_clusters": few_clusters(next(iter(losses.values())), (*train, *ood)) if losses else [],
        "comparisons": [asdict(row) for row in compare_runs(others, losses, setting, _generator())],
        "runs": described,
        "points": [row for run in runs for row in _points(run, train)],
        "curves": [row for run in runs for row in curve(run)],
        "documents": _documents(losses),
        "evaluations": evaluations(records, runs, without=EVALUATION),
        "failures": failures,
        "sweep": [asdict(sweep) | {"at_edge": sweep.at_edge} for sweep in records.sweeps()],
        "overlap": environment.pop("overlap", []),
        "text_note": environment.pop("text_note", None),
        "settings": study,
        "environment": environment,
    }


def _generator() -> np.random.Generator:
    return np.random.default_rng(DRAW_SEED)


def _seconds(described: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median training time of finished runs by architecture."""
    times: dict[str, list[float]] = {}
    for run in described:
        if run["status"] == "finished" and run["seconds"] is not None:
            times.setdefault(run["name"], []).append(run["seconds"])
    return {name: float(np.median(found)) for name, found in times.items()}


def _bigram_loss(records: StudyRecords, environment: dict[str, Any]) -> float:
    """Return what a study has to get below before there can be a verdict; raises DataError where it is not known."""
    found = environment.get("bigram_loss")
    if not isinstance(found, int | float):
        place = records.path / "environment.json"
        raise DataError(f"{place} does not hold the loss of a bigram model; run the study again, which writes it.")
    return float(found)


def _load(runs: Sequence[Run], domains: Sequence[str]) -> tuple[Runs, list[dict[str, Any]]]:
    """Read what can be compared; what failed, and what cannot be read, is told."""
    losses, failures = {}, []
    for run in runs:
        if run.info["status"] == "failed":
            failures.append(run.label | {"message": run.info["message"]})
        try:
            found = load(run.records, run.evals, run.metrics, domains)
        except DataError as error:
            failures.append(run.label | {"message": str(error)})
            continue
        if found is not None:
            losses[run.info["name"], run.info["seed"]] = found
    return losses, failures


def _points(run: Run, train: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per evaluated checkpoint: losses held out, in training and per domain."""
    checkpoints: dict[int, list[Record]] = {}
    for record in run.evals:
        if record.eval == EVALUATION:
            checkpoints.setdefault(record.step, []).append(record)
    rows = []
    for step, records in sorted(checkpoints.items()):
        domains: dict[str, dict[str, float]] = {}
        for record in records:
            domains.setdefault(record.subset, {})[record.metric] = record.value
        weights = {record.subset: record.n for record in records if record.metric == "loss" and record.subset in train}
        losses = [domains[domain]["loss"] for domain in weights]
        tested = any(weights.values())
        held_out = float(np.average(losses, weights=list(weights.values()))) if tested else None
        training = float(smoothed_training_loss(run.metrics, [step])[0])
        rows.append(
            run.label
            | {
                "step": step,
                "tokens": records[0].tokens,
                "training": training if np.isfinite(training) else None,
                "held_out": held_out,
                "domains": domains,
            }
        )
    return rows


def _documents(losses: Runs) -> list[dict[str, Any]]:
    first = next(iter(losses.values()), None)
    return [
        {
            "domain": domain,
            "documents": len(found.tokens),
            "tokens": int(found.tokens.sum()),
            "bytes": int(found.bytes.sum()),
        }
        for domain, found in (first.domains if first else {}).items()
    ]

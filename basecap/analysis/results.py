"""From records to results.json: every number that the report shows."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from basecap.analysis.comparison import Runs, Setting, compare_runs
from basecap.analysis.gap import CONFIDENCE
from basecap.analysis.losses import EVALUATION, load
from basecap.errors import DataError
from basecap.records import Record, RunRecords, StudyRecords

#: Draws of documents behind every interval.
RESAMPLES = 2000
#: Seed of the draws: the same records give the same results.
DRAW_SEED = 2025
#: The training loss at a checkpoint is its mean over the last twentieth of the steps so far.
SMOOTHING = 0.05
#: Points of a drawn training curve, spread evenly over the logarithm of the steps.
CURVE_POINTS = 300


def analyse(study_dirs: Sequence[Path]) -> dict[str, Any]:
    """Analyse studies, each for itself.

    Returns:
        {"studies": [...]}, plain numbers and text. A study holds name, summary, reference, tolerance, confidence,
        resamples, train_domains, ood_domains; `comparisons` (a row per architecture but the reference: verdict, words,
        gaps with intervals, see `comparison.compare_runs`); `runs`, `points` (a row per evaluated checkpoint), `curves`
        (smoothed training loss), `documents` (what was held out per domain), `evaluations` (any other declared
        evaluation with its rows), `failures`, `settings` (the resolved study) and `environment`.

    Raises:
        ConfigError: a directory that holds no study.
        DataError: records that cannot be read.
    """
    return {"studies": [_analyse_study(StudyRecords(Path(path))) for path in study_dirs]}


def _analyse_study(records: StudyRecords) -> dict[str, Any]:
    study = records.study()
    train, ood = list(study["data"]["train"]), list(study["data"]["ood"])
    names = [entry["name"] for entry in study["architectures"]]
    found = sorted(records.runs(), key=lambda run: (names.index(run.info()["name"]), run.info()["seed"]))
    losses, failures = _load(found, (*train, *ood))
    setting = Setting(
        reference=study["reference"], train=train, ood=ood, tolerance=study["gap"]["tolerance"], resamples=RESAMPLES
    )
    others = [name for name in names if name != study["reference"]]
    return {
        "name": study["name"],
        "summary": study.get("summary", ""),
        "reference": study["reference"],
        "tolerance": setting.tolerance,
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "train_domains": train,
        "ood_domains": ood,
        "comparisons": compare_runs(others, losses, setting, np.random.default_rng(DRAW_SEED)),
        "runs": [_describe(run) for run in found],
        "points": [row for run in found for row in _points(run, train)],
        "curves": [row for run in found for row in _curve(run)],
        "documents": _documents(losses),
        "evaluations": _evaluations(records, found),
        "failures": failures,
        "settings": study,
        "environment": records.environment(),
    }


def _load(found: Sequence[RunRecords], domains: Sequence[str]) -> tuple[Runs, list[dict[str, Any]]]:
    """Read what can be compared; what failed, and what cannot be read, is told and left out."""
    losses, failures = {}, []
    for run in found:
        info = run.info()
        if info["status"] == "failed":
            failures.append({"name": info["name"], "seed": info["seed"], "message": info["message"]})
        try:
            read = load(run, domains)
        except DataError as error:
            failures.append({"name": info["name"], "seed": info["seed"], "message": str(error)})
            continue
        if read is not None:
            losses[info["name"], info["seed"]] = read
    return losses, failures


def _describe(run: RunRecords) -> dict[str, Any]:
    info, metrics = run.info(), run.metrics()
    last = metrics[-1] if metrics else {}
    return {
        "name": info["name"],
        "seed": info["seed"],
        "use": info.get("use"),
        "status": info["status"],
        "parameters": info.get("parameters"),
        "seconds": info.get("seconds"),
        "tokens": last.get("tokens", 0),
        "tokens_per_s": float(np.median([row["tokens_per_s"] for row in metrics])) if metrics else None,
    }


def _points(run: RunRecords, train: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per evaluated checkpoint: losses held out, in training and per domain."""
    info, metrics = run.info(), run.metrics()
    steps = np.array([row["step"] for row in metrics])
    trained = np.array([row["train_loss"] for row in metrics])
    checkpoints: dict[int, list[Record]] = {}
    for record in run.evals():
        if record.eval == EVALUATION:
            checkpoints.setdefault(record.step, []).append(record)
    rows = []
    for step, records in sorted(checkpoints.items()):
        domains: dict[str, dict[str, float]] = {}
        for record in records:
            domains.setdefault(record.subset, {})[record.metric] = record.value
        weights = {record.subset: record.n for record in records if record.metric == "loss" and record.subset in train}
        losses = [domains[domain]["loss"] for domain in weights]
        recent = trained[(steps <= step) & (steps > step * (1 - SMOOTHING))]
        rows.append(
            {
                "name": info["name"],
                "seed": info["seed"],
                "step": step,
                "tokens": records[0].tokens,
                "training": float(recent.mean()) if len(recent) else None,
                "held_out": float(np.average(losses, weights=list(weights.values()))) if weights else None,
                "domains": domains,
            }
        )
    return rows


def _curve(run: RunRecords) -> list[dict[str, Any]]:
    """Thin the training loss out to means over stretches that are even on a logarithmic axis."""
    info, metrics = run.info(), run.metrics()
    if not metrics:
        return []
    edges = np.unique(np.geomspace(1, len(metrics) + 1, CURVE_POINTS + 1).astype(int) - 1)
    return [
        {
            "name": info["name"],
            "seed": info["seed"],
            "tokens": metrics[end - 1]["tokens"],
            "loss": float(np.mean([row["train_loss"] for row in metrics[start:end]])),
        }
        for start, end in itertools.pairwise(edges.tolist())
    ]


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


def _evaluations(records: StudyRecords, found: Sequence[RunRecords]) -> list[dict[str, Any]]:
    """Return every declared evaluation but the one the gap is made of, with the rows of each run's last checkpoint."""
    evaluations = []
    for name, declaration in records.declarations().items():
        rows = []
        for run in found:
            own = [record for record in run.evals() if record.eval == name]
            last = max((record.step for record in own), default=0)
            info = run.info()
            rows += [
                {"name": info["name"], "seed": info["seed"]} | asdict(record) for record in own if record.step == last
            ]
        if name != EVALUATION:
            evaluations.append(asdict(declaration) | {"axes": list(declaration.axes), "rows": rows})
    return evaluations

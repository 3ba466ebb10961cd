"""What a study would cost on this machine: the rows of `basecap plan`."""

import time
from pathlib import Path
from typing import Any

import torch

from basecap import environment
from basecap.data import prepared_before, wanting
from basecap.study.config import StudyConfig
from basecap.study.plan import RunSpec, cost, plan_evaluations, plan_runs, plan_training
from basecap.study.preparing import cache_of
from basecap.study.prospects import prospects
from basecap.train.config import Timetable

#: Evaluation points that a curve needs between `gap.from` and the end: of the reference, and of any other architecture.
FEWEST_OF_THE_REFERENCE, FEWEST = 10, 4

#: Share of the machine's matrix rate that training is assumed to reach, and the column that says so.
UTILISATION = 0.35
CHECKPOINTS, KEPT = "checkpoints (GiB)", "weights (GiB)"
HOURS = f"hours if all reach {UTILISATION:.0%}"


def estimate(study: StudyConfig) -> list[dict[str, Any]]:
    """Return one row per run; in a sweep of learning rates also the rate, where it is known beforehand.

    Memory is that of weights, gradients and optimiser, without activations; state is the decoding state of a sequence
    of the training length, in fp32; hours are at one share of the matrix rate measured here, without evaluations.
    """
    device = environment.choose_device(None)
    rate = matrix_rate(device)
    plan_evaluations(study)
    rows = []
    for run in _all_runs(study):
        found = cost(run)
        rates = {"lr": run.rate or "the best"} if study.train.sweep else {}
        rows.append(
            {
                "architecture": run.name,
                "seed": run.seed,
                **rates,
                "blocks": found.blocks,
                "parameters (M)": round(found.parameters / 1e6, 2),
                "tokens (M)": round(found.tokens / 1e6, 2),
                "PFLOP": found.flops / 1e15,
                "weights + optimiser (GiB)": found.memory / 2**30,
                "state (KiB)": found.state / 2**10,
                CHECKPOINTS: found.checkpoints / 2**30,
                KEPT: found.weights / 2**30,
                "evaluations": found.evaluations,
                HOURS: found.flops / (UTILISATION * rate) / 3600,
            }
        )
    return rows


def _all_runs(study: StudyConfig) -> list[RunSpec]:
    """Return the runs of a study, the later seeds of a sweep with any of its rates: they cost the same."""
    runs = plan_runs(study, study.vocabulary)
    if not study.train.sweep:
        return runs
    chosen = {run.name: study.train.sweep[0] for run in runs}
    later = plan_runs(study, study.vocabulary, chosen)
    return runs + [run for run in later if run.seed != study.seeds_of(run.architecture)[0]]


def remarks(study: StudyConfig, rows: list[dict[str, Any]], out: Path) -> list[str]:
    """Return what is to be said below the rows of `estimate`: the sum, what they leave out, what `out` would need."""
    hours, work = (sum(row[key] for row in rows) for key in (HOURS, "PFLOP"))
    rate = work * 1000 / (UTILISATION * hours * 3600)  # TFLOP/s, as `estimate` found it
    return [
        f"All {len(rows)} runs: {_hours(hours)} {HOURS} of this machine's matrix rate, {rate:.3g} TFLOP/s; at the same "
        f"share of 1,000 TFLOP/s, {_hours(hours * rate / 1000)} hours.",
        "Left out: activations, which may take many times the memory of weights, gradients and optimiser; evaluations. "
        "Architectures differ in the share they reach: `basecap bench models` measures it.",
        f"Disk: {sum(row[CHECKPOINTS] for row in rows):.3g} GiB for checkpoints, two of each run, and "
        f"{sum(row[KEPT] for row in rows):.3g} GiB for weights (train.keep = {study.train.keep}).",
        *(_of_text(study, out) if study.task is None else ()),
    ]


def _of_text(study: StudyConfig, out: Path) -> list[str]:
    """Return what is to be said of a study of text."""
    cache = cache_of(study, out)
    return [
        *sparse(study),
        *prospects(study, prepared_before(study.text, cache)),
        *(f"Missing: {sentence}" for sentence in wanting(study.text, cache)),
    ]


def sparse(study: StudyConfig) -> list[str]:
    """Return a warning for the architectures that are evaluated too rarely for a curve."""
    found: dict[tuple[int, int], list[str]] = {}
    for entry in study.architectures:
        timetable = Timetable(plan_training(study, entry), study.length)
        points = timetable.evaluations_after(study.gap.start)
        needed = FEWEST_OF_THE_REFERENCE if entry.name == study.reference else FEWEST
        if points < needed:
            found.setdefault((points, needed), []).append(entry.name)
    return [
        f"Warning: too few evaluation points after gap.from = {study.gap.start:g} of the tokens, {points} where a "
        f"curve needs {needed}: {', '.join(names)}; lower train.eval_every or leave it out."
        for (points, needed), names in found.items()
    ]


def _hours(number: float) -> str:
    return f"{number:{',.0f' if number >= 100 else '.3g'}}"


def matrix_rate(device: torch.device, seconds: float = 0.2) -> float:
    """Measure floating-point operations per second of matrix products (bf16 on a GPU, fp32 on a CPU)."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    a @ a
    _wait(device)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        a @ a
        _wait(device)
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

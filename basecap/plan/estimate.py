"""What `basecap plan` prints of the cost of a study on this machine."""

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basecap.data import find_prepared
from basecap.evals import Evaluation
from basecap.plan.evaluation_work import decoding_memory, evaluation_shares, evaluation_work, works
from basecap.plan.maturity import maturity_warnings
from basecap.plan.needs import little_disk
from basecap.plan.prospects import cut_patterns, prospects, short_runs
from basecap.plan.runs import Plan, RunSpec, costs, moved_points, plan_runs
from basecap.plan.workloads import Tasks, Workloads, cache_of
from basecap.records import StudyRecords
from basecap.study.config import StudyConfig
from basecap.system import environment
from basecap.system.progress import duration
from basecap.testing.check_model import BUDGET, built_in
from basecap.testing.trained_model import BUDGET as TEST_BUDGET
from basecap.train.wall_time import shares

#: Shares of the machine's matrix rate that training is assumed to reach, the higher first. Of one H200's nominal rate
#: transformers and Top-1 models reach 0.41 to 0.45 and recurrent ones 0.1 to 0.33 (results/models). Of one core of an
#: EPYC the models of quickstart reach 0.26 to 0.34, those of lp-table-1 at scale laptop 0.16 to 0.41; of two cores, two
#: runs side by side, all 16 of quickstart reach 0.18: 3 min 46 s with evaluations, start and report.
UTILISATION = (0.4, 0.15)
SHARES = f"{100 * UTILISATION[1]:.0f} % to {100 * UTILISATION[0]:.0f} %"
#: Seconds that a GPU needs for a block in a training step too small to keep it busy, with seven to nine runs side by
#: side: width 512, about 1,000 tokens a step. On an H200 from 0.49 ms (mamba-1) to 0.74 ms (gated-deltanet) in the runs
#: of lp-table-1 that saw 8.3M tokens (results/recall/gpu.json), 2.6 ms in lp-table-2; with train.cuda_graphs on an H100
#: from 0.11 ms (top1-chunk-exact) to 0.43 ms (all runs, with compiling; results/recall/gpu-clean.json).
LAUNCHES, GRAPHS = (0.5e-3, 2.6e-3), (0.11e-3, 0.43e-3)
#: Seconds on a GPU of 1,000 TFLOP/s from which a study and an evaluation have sentences about such a GPU.
LONG = 60
#: Seconds for which the matrix rate is measured.
MEASURED = 0.1
#: The most jobs that --per-device takes.
MOST_ASIDE = 64
EVALUATING = "evaluation PFLOP"
STEPS, RESUME, KEPT = "steps", "resume (GiB)", "weights (GiB)"
#: Columns of the times at these shares.
HOURS = tuple(f"hours if all reach {share:.0%}" for share in UTILISATION)


def estimate(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Return one row per run of a plan; in a sweep of learning rates also the rate, if it is already known.

    Memory is that of weights, gradients and optimiser, without activations; state is the decoding state of a sequence
    of the training length, in fp32; hours are at two shares of the matrix rate measured here. They include evaluations
    as far as these say what they read, and none of text that is not prepared in `out`: their work is None then.
    """
    study, rows = plan.study, []
    rate = matrix_rate(environment.choose_device(None))
    runs = _with_later_seeds(study, plan.runs)
    workloads = _workloads(study, out)
    shares = evaluation_shares(runs, plan.evaluations, workloads) if workloads else [None] * len(runs)
    for run, found, share in zip(runs, costs(runs), shares, strict=True):
        rates = {"lr": run.rate or "the best"} if study.train.sweep else {}
        rows.append(
            {
                "architecture": run.name,
                "seed": run.seed,
                **rates,
                "blocks": found.blocks,
                "parameters (M)": float(f"{found.parameters / 1e6:.3g}"),
                STEPS: found.steps,
                "tokens (M)": float(f"{found.tokens / 1e6:.3g}"),
                "PFLOP": found.flops / 1e15,
                EVALUATING: None if share is None else share * found.flops / 1e15,
                "weights + optimiser (GiB)": found.memory / 2**30,
                "state (KiB)": found.state / 2**10,
                RESUME: found.resume / 2**30,
                KEPT: found.weights / 2**30,
                "evaluations": found.evaluations,
                **{
                    hours: (1 + (share or 0.0)) * found.flops / (reached * rate) / 3600
                    for hours, reached in zip(HOURS, UTILISATION, strict=True)
                },
            }
        )
    return rows


def _workloads(study: StudyConfig, out: Path) -> Workloads:
    """Return what runs train on by their training task, nothing for text that is not prepared."""
    if study.task is not None:
        return Tasks(study.task).workloads()
    data = find_prepared(study.text, cache_of(study.text, out))
    return {} if data is None else {None: data}


def _with_later_seeds(study: StudyConfig, runs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the runs of a study and, in a sweep, those of the later seeds at any of its rates: they cost the same."""
    if not study.train.sweep:
        return [*runs]
    chosen = {run.name: study.train.sweep[0] for run in runs}
    later = plan_runs(study, study.vocabulary, chosen)
    return [*runs, *(run for run in later if run.seed != study.seeds_of(run.architecture)[0])]


def remarks(plan: Plan, rows: list[dict[str, Any]], out: Path, gpus: int | None = None) -> list[str]:
    """Return the lines below the rows of `estimate`: the total, that on `gpus`, what it leaves out, disk, warnings."""
    study, workloads = plan.study, _workloads(plan.study, out)
    seconds, evaluating = _seconds(rows), sum(row[EVALUATING] or 0.0 for row in rows)
    work = sum(row["PFLOP"] for row in rows) + evaluating
    part = "under 1 %" if evaluating < 0.005 * work else f"{100 * evaluating / work:.0f} %"
    share = f"{part} of it for evaluations" if evaluating else "without evaluations"
    rate = work * 1000 / (UTILISATION[0] * seconds[0])  # TFLOP/s, as `estimate` found it
    on_gpu, small = [time * rate / 1000 for time in seconds], _small(study, rows)
    long = gpus is not None or max(*on_gpu, *small) >= LONG
    return [
        f"{_all(len(rows), _span(*seconds), share)} {SHARES} of this machine's matrix rate, now {rate:.3g} TFLOP/s"
        + (f"; at the same shares of 1,000 TFLOP/s, {_span(*on_gpu)}." if long else "."),
        *_on_gpus(rows, rate, gpus),
        *_finished(rows, out),
        *(_launches(study, rows, small) if long else ()),
        *_early_ends(study),
        *_proofs(plan.runs),
        "Left out: activations, which may take many times the memory of weights, gradients and optimiser"
        f"{'' if evaluating else '; the time of evaluations'}. Architectures differ in the share they reach: `basecap "
        "bench models` measures it.",
        f"Disk: {sum(row[RESUME] for row in rows):.3g} GiB in resume/, the last two checkpoints of each run, and "
        f"{sum(row[KEPT] for row in rows):.3g} GiB in weights/ (train.keep = {study.train.keep}).",
        *_threads(rows, out),
        *(f"Warning: {sentence}" for sentence in little_disk(plan.runs, out)),
        *_passes(plan, workloads),
        *maturity_warnings(plan, _parameters(study, rows), _pass_sizes(workloads)),
        *short_runs(plan.runs),
        *cut_patterns(plan.runs),
        *(prospects(plan, out) if study.task is None else ()),
        *_evaluations(plan, rows, workloads),
    ]


def _on_gpus(rows: list[dict[str, Any]], rate: float, gpus: int | None) -> list[str]:
    """Return the time on several GPUs of 1,000 TFLOP/s, nothing without a number; `rate` is this machine's."""
    if gpus is None:
        return []
    shares = [[3600 * row[hours] * rate / 1000 for row in rows] for hours in HOURS]
    whole, longest = _span(*(wall_time(one, gpus) for one in shares)), _span(*(max(one) for one in shares))
    more = (
        f"; the longest run takes {longest}, also on more GPUs unless torchrun gives it several"
        if len(rows) > 1
        else ""
    )
    return [f"On {gpus} such GPUs, one run on each at a time: {whole}{more}."]


def wall_time(seconds: Sequence[float], gpus: int) -> float:
    """Return the seconds until all runs have ended, each on one GPU; the longest begin first.

    >>> wall_time([3.0, 1.0, 2.0, 2.0], gpus=2), wall_time([3.0, 1.0], gpus=8)
    (4.0, 3.0)
    """
    free = [0.0] * min(gpus, len(seconds))
    for run in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + run)
    return max(free, default=0.0)


def _proofs(runs: Sequence[RunSpec]) -> list[str]:
    """Return sentences on how long the proofs and leak tests of a study take at most."""
    text = runs[0].task is None
    longest = f"at most {TEST_BUDGET:.0f} s"
    tests = [f"Leak test of each trained model: {longest}, mostly a few forward passes."] if text else []
    names = dict.fromkeys(run.architecture for run in runs if not built_in(run.model))
    if not names:
        return tests
    each = " each" if len(names) > 1 else ""
    more = f", and a leak test with random parameters, {longest}{each}" if text else ""
    proof = f"Before training: a proof that no output of {', '.join(names)} sees the future"
    return [f"{proof}, at most {BUDGET:.0f} s{each}{more}.", *tests]


def _threads(rows: list[dict[str, Any]], out: Path) -> list[str]:
    """Return how many CPU threads runs on a CPU take, nothing where there is one thread or a GPU."""
    most, held = environment.most_threads(), StudyRecords(out).run_threads()
    names = dict.fromkeys(row["architecture"] for row in rows)
    chosen = sorted({held[name] for name in names if name in held})
    if environment.choose_device(None).type != "cpu" or (most == 1 and not chosen):
        return []
    line = f"CPU threads of a run: 1 or {most}, whichever a trial step shows is faster (--threads N sets them)."
    if chosen:
        line = f"CPU threads of a run: {' or '.join(map(str, chosen))}, as recorded in {out}."
    return [line]


def _finished(rows: list[dict[str, Any]], out: Path) -> list[str]:
    """Return which runs need no more training, the time of the others and where theirs went, once there is one."""
    records, left, finished = StudyRecords(out), [], []
    for row in rows:
        rate = row.get("lr") if isinstance(row.get("lr"), float) else None
        info = records.run(row["architecture"], row["seed"], rate).info()
        if info is not None and info.finished:
            finished.append(info.seconds)
        else:
            left.append(row)
    if not finished:
        return []
    rest = f"those left take {_span(*_seconds(left))} of that time" if left else "none is left to train"
    line, spent = f"Finished in {out}: {len(finished)} of {len(rows)} runs; {rest}.", shares(finished)
    if spent:
        steps, points, start = (f"{100 * spent[part]:.0f} %" for part in ("steps", "evaluations", "start"))
        line += f" They spent {steps} of their time in steps, {points} at evaluation points and {start} before the "
        line += "second step."
    return [line]


def _evaluations(plan: Plan, rows: list[dict[str, Any]], workloads: Workloads) -> list[str]:
    """Return what the evaluations take, and which points they move to; `rows` begin with those of the plan's runs."""
    runs, evaluations = plan.runs, plan.evaluations
    moved = [moved_points(runs, found.config.at, f"evals: {found.declaration.name}: at") for found in evaluations]
    return [
        *itertools.chain(*moved),
        *evaluation_work(runs, evaluations, workloads),
        *itertools.chain(*(_long(found, runs, rows, workloads) for found in evaluations)),
        *decoding_memory(runs, evaluations),
    ]


def _long(
    evaluation: Evaluation, runs: Sequence[RunSpec], rows: list[dict[str, Any]], workloads: Workloads
) -> list[str]:
    """Return how long an evaluation takes where it takes long on a GPU of 1,000 TFLOP/s."""
    found = zip(works(runs, evaluation, workloads), rows, strict=False)
    timed = [(work.relative * row["PFLOP"], row["architecture"]) for work, row in found if work is not None]
    work, name = max(timed, default=(0.0, ""))
    least, most = (work / share for share in UTILISATION)
    if least < LONG:
        return []
    return [
        f"{evaluation.declaration.name} takes about {_span(least, most)} of a run of {name} at these shares of 1,000 "
        "TFLOP/s. That is an estimate, without what Python adds to each new token."
    ]


def _passes(plan: Plan, workloads: Workloads) -> list[str]:
    """Return how often runs read their training text, nothing for tasks and for text that is not prepared."""
    return [
        f"Passes over the training text of {size / 1e6:.3g}M tokens: "
        + _listed_passes({run.passes(size) for run in plan.runs})
        for size in _pass_sizes(workloads)
    ]


def _pass_sizes(workloads: Workloads) -> list[int]:
    """Return the tokens of one pass over the training text, none for tasks and for text that is not prepared."""
    sizes = {workload.pass_tokens for workload in workloads.values()}
    return [size for size in sizes if size is not None]


def _parameters(study: StudyConfig, rows: list[dict[str, Any]]) -> float:
    """Return the parameters of the reference, those of the first architecture in a study without it."""
    own = [row["parameters (M)"] for row in rows if row["architecture"] == study.reference]
    return 1e6 * (own or [rows[0]["parameters (M)"]])[0]


def _listed_passes(passes: set[float]) -> str:
    least, most = (f"{number:.2g}" for number in (min(passes), max(passes)))
    return f"{least} a run." if least == most else f"{least} to {most} a run."


def _early_ends(study: StudyConfig) -> list[str]:
    if study.train.stop_at is None:
        return []
    sweep = ", and a sweep ends with the first learning rate that does" if study.train.sweep else ""
    return [f"Runs end earlier where they reach train.stop_at = {study.train.stop_at:g}{sweep}."]


def _all(runs: int, time: str, share: str) -> str:
    if runs == 1:
        return f"1 run: {time}, {share}, if it reaches"
    cores = torch.get_num_threads() if environment.choose_device(None).type == "cpu" else 1
    aside = min(cores, runs, MOST_ASIDE)
    order = " one after the other" if aside == 1 else f", {aside} side by side (--per-device {aside})"
    return f"All {runs} runs: {time}{order}, {share}, if all reach"


def _launch_seconds(study: StudyConfig) -> tuple[float, float]:
    return LAUNCHES if study.train.cuda_graphs is False else GRAPHS


def _small_rows(study: StudyConfig, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the runs that a GPU of 1,000 TFLOP/s could not train at these shares."""
    least, _ = _launch_seconds(study)
    return [row for row in rows if row["PFLOP"] / UTILISATION[0] < least * row["blocks"] * row[STEPS]]


def _small(study: StudyConfig, rows: list[dict[str, Any]]) -> list[float]:
    """Return the seconds that such a GPU needs for those runs, the least and the most."""
    work = sum(row["blocks"] * row[STEPS] for row in _small_rows(study, rows))
    return [work * each for each in _launch_seconds(study)]


def _launches(study: StudyConfig, rows: list[dict[str, Any]], seconds: Sequence[float]) -> list[str]:
    """Return a line about the runs that a GPU of 1,000 TFLOP/s could not train at these shares, if there are any."""
    count, (least, most) = len(_small_rows(study, rows)), _launch_seconds(study)
    if not count:
        return []
    graphs = study.train.cuda_graphs is not False
    which = f"{count} of the runs" if count < len(rows) else "these runs" if count > 1 else "this run"
    where = "an H100 as CUDA graphs" if graphs else "an H200"
    return [
        f"But the steps of {which} are too small to keep such a GPU busy. At {1e3 * least:g} to {1e3 * most:g} ms a "
        f"step and block, as recall at scale gpu took on {where}, seven to nine runs side by side, they take "
        f"{_span(*seconds)}, and longer one after the other"
        + ("." if graphs else "; train.cuda_graphs=auto makes them faster.")
    ]


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of `estimate` for people: seeds that cost the same in one row, and times with units.

    Steps, blocks and evaluation points are left out, and the work of evaluations and the disk space, which `remarks`
    sum up.
    """
    hidden = ("seed", STEPS, "blocks", "evaluations", EVALUATING, RESUME, KEPT, *HOURS)
    seeds: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for row in rows:
        visible = {key: value for key, value in row.items() if key not in hidden}
        shown = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in visible.items()}
        seeds.setdefault(tuple((shown | {"time": _span(*_seconds([row]))}).items()), []).append(row["seed"])
    return [{first: name, "seeds": _spans(own), **dict(rest)} for ((first, name), *rest), own in seeds.items()]


def _seconds(rows: list[dict[str, Any]]) -> list[float]:
    """Return the time of all rows together at each share."""
    return [3600 * sum(row[hours] for row in rows) for hours in HOURS]


def _span(low: float, high: float) -> str:
    """Return two times in seconds as "10 s to 20 s", as one where they read the same."""
    shortest, longest = duration(low), duration(high)
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _spans(numbers: list[int]) -> str:
    """Write numbers in short.

    >>> _spans([0, 1, 2, 3, 7, 9, 8, 12])
    '0-3, 7-9, 12'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans)


def matrix_rate(device: torch.device) -> float:
    """Measure floating-point operations per second of matrix products (bf16 on a GPU, fp32 on all cores of a CPU).

    On a CPU one thread is measured by its processor time, so that other work on the machine does not count.
    """
    if device.type == "cuda":
        return _product_rate(torch.ones(8192, 8192, device=device, dtype=torch.bfloat16), time.perf_counter)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return threads * _product_rate(torch.ones(1024, 1024), time.thread_time)
    finally:
        torch.set_num_threads(threads)


def _product_rate(matrix: Tensor, clock: Callable[[], float]) -> float:
    """Return the operations per second of the product of a matrix with itself."""
    matrix @ matrix
    _wait(matrix.device)
    count, began = 0, clock()
    while clock() - began < MEASURED:
        matrix @ matrix
        _wait(matrix.device)
        count += 1
    return 2.0 * len(matrix) ** 3 * count / (clock() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

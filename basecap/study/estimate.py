"""What `basecap plan` prints: the cost of a study on this machine, and the verdicts to expect."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basecap import environment
from basecap.analysis.draws import FEWEST_DOCUMENTS, FEWEST_OF_A_DOMAIN
from basecap.analysis.losses import EVALUATION
from basecap.analysis.power import MOST_RUNS, Noise, expected_half_width, expected_tolerance, noise_of
from basecap.analysis.reasons import TEST_SCALE
from basecap.data import DocumentSet, PreparedData, find_prepared, missing_inputs
from basecap.data.tokenizer import BYTES
from basecap.evals.domain_loss import DomainLoss
from basecap.names import TEST
from basecap.progress import duration
from basecap.study.config import StudyConfig
from basecap.study.evaluation_work import evaluation_shares, evaluation_work
from basecap.study.plan import RunSpec, costs, plan_evaluations, plan_runs, plan_training
from basecap.study.start import check
from basecap.study.workloads import Tasks, Workloads, cache_of
from basecap.train.config import Timetable
from basecap.train.schedule import warmup_steps

#: Evaluation points that a curve needs between `gap.from` and the end: of the reference, and of any other architecture.
FEWEST_OF_THE_REFERENCE, FEWEST = 10, 4

#: Training tokens per entry of the vocabulary below which models may end above the loss of a bigram model. The
#: quickstart's reference ends above it after 390 and 584 per entry and below it after 779, in runs of that length;
#: models of limited-zoo, which see 7,300, went below it between 730 and 1,500.
LEAST_PER_ENTRY = 700

#: Shares of the machine's matrix rate that training is assumed to reach, the higher first. Of one H200's nominal rate
#: transformers and Top-1 models reach 0.41 to 0.45 and recurrent ones 0.1 to 0.33 (results/models). Of one core of an
#: EPYC the models of quickstart reach 0.26 to 0.34, those of lp-table-1 at scale laptop 0.16 to 0.41; of two cores, two
#: runs side by side, all of quickstart reaches 0.22: its 5 min 34 s include evaluations, start and report.
UTILISATION = (0.4, 0.15)
SHARES = f"{UTILISATION[1]:.0%} to {UTILISATION[0]:.0%}"
#: Seconds that a GPU needs for a block in a training step too small to keep it busy, with seven to nine runs side by
#: side: width 512, about 1,000 tokens a step. On an H200 from 0.49 ms (mamba-1) to 0.74 ms (gated-deltanet) in the runs
#: of lp-table-1 that saw 8.3M tokens (results/recall/gpu.json), 2.6 ms in lp-table-2; with train.cuda_graphs on an H100
#: from 0.11 ms (top1-chunk-exact) to 0.43 ms (all runs, with compiling; results/recall/gpu-clean.json).
LAUNCHES, GRAPHS = (0.5e-3, 2.6e-3), (0.11e-3, 0.43e-3)
#: Seconds for which the matrix rate is measured.
MEASURED = 0.1
#: The most jobs that --per-device takes.
MOST_ASIDE = 64
EVALUATING = "evaluation PFLOP"
STEPS, RESUME, KEPT = "steps", "resume (GiB)", "weights (GiB)"
#: Columns of the times at these shares: for JSON, and for people.
HOURS = tuple(f"hours if all reach {share:.0%}" for share in UTILISATION)
TIME = f"time if all reach {SHARES}"


def estimate(study: StudyConfig, out: Path) -> list[dict[str, Any]]:
    """Return one row per run; in a sweep of learning rates also the rate, if it is already known.

    Raises what `basecap run` raises before it prepares text.

    Memory is that of weights, gradients and optimiser, without activations; state is the decoding state of a sequence
    of the training length, in fp32; hours are at two shares of the matrix rate measured here. They include evaluations
    as far as these say what they read, and none of text that is not prepared in `out`: their work is None then.
    """
    device = environment.choose_device(None)
    rate = matrix_rate(device)
    runs, rows = _with_later_seeds(study, check(study)), []
    workloads = _workloads(study, out)
    shares = evaluation_shares(runs, plan_evaluations(study), workloads) if workloads else [None] * len(runs)
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


def _with_later_seeds(study: StudyConfig, runs: list[RunSpec]) -> list[RunSpec]:
    """Return the runs of a study and, in a sweep, those of the later seeds at any of its rates: they cost the same."""
    if not study.train.sweep:
        return runs
    chosen = {run.name: study.train.sweep[0] for run in runs}
    later = plan_runs(study, study.vocabulary, chosen)
    return runs + [run for run in later if run.seed != study.seeds_of(run.architecture)[0]]


def remarks(study: StudyConfig, rows: list[dict[str, Any]], out: Path) -> list[str]:
    """Return the lines below the rows of `estimate`: the total, what it leaves out, disk, warnings."""
    seconds, evaluating = _seconds(rows), sum(row[EVALUATING] or 0.0 for row in rows)
    work = sum(row["PFLOP"] for row in rows) + evaluating
    part = "under 1%" if evaluating < 0.005 * work else f"{evaluating / work:.0%}"
    share = f"{part} of it for evaluations" if evaluating else "without evaluations"
    rate = work * 1000 / (UTILISATION[0] * seconds[0])  # TFLOP/s, as `estimate` found it
    return [
        f"{_all(len(rows), _span(*seconds), share)} {SHARES} of this machine's matrix rate, now {rate:.3g} TFLOP/s; "
        f"at the same shares of 1,000 TFLOP/s, {_span(*(time * rate / 1000 for time in seconds))}.",
        *_launches(study, rows),
        *_early_ends(study),
        "Left out: activations, which may take many times the memory of weights, gradients and optimiser"
        f"{'' if evaluating else '; the time of evaluations'}. Architectures differ in the share they reach: `basecap "
        "bench models` measures it.",
        f"Disk: {sum(row[RESUME] for row in rows):.3g} GiB in resume/, the last two checkpoints of each run, and "
        f"{sum(row[KEPT] for row in rows):.3g} GiB in weights/ (train.keep = {study.train.keep}).",
        *_short_runs(study),
        *(_of_text(study, out) if study.task is None else ()),
        *_evaluations(study, _workloads(study, out)),
    ]


def _evaluations(study: StudyConfig, workloads: Workloads) -> list[str]:
    """Return what the evaluations take, and what they lack."""
    evaluations = plan_evaluations(study)
    return [
        *(evaluation_work(plan_runs(study, study.vocabulary), evaluations, workloads) if workloads else ()),
        *(f"Missing: {sentence}" for found in evaluations for sentence in found.missing()),
    ]


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


def _launches(study: StudyConfig, rows: list[dict[str, Any]]) -> list[str]:
    """Return a line about the runs that a GPU of 1,000 TFLOP/s could not train at these shares of it; none for none."""
    graphs = study.train.cuda_graphs
    least, most = GRAPHS if graphs else LAUNCHES
    small = [row for row in rows if row["PFLOP"] / UTILISATION[0] < least * row["blocks"] * row[STEPS]]
    if not small:
        return []
    work = sum(row["blocks"] * row[STEPS] for row in small)
    which = f"{len(small)} of the runs" if len(small) < len(rows) else "these runs" if len(rows) > 1 else "this run"
    where = "an H100 as CUDA graphs" if graphs else "an H200"
    return [
        f"But the steps of {which} are too small to keep such a GPU busy. At {1e3 * least:g} to {1e3 * most:g} ms a "
        f"step and block, as recall at scale gpu took on {where}, seven to nine runs side by side, they take "
        f"{_span(work * least, work * most)}, and longer one after the other"
        + ("." if graphs else "; train.cuda_graphs=true makes them faster.")
    ]


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of `estimate` for people: seeds that cost the same in one row, and times with units.

    Steps are left out, and the work of evaluations and the disk space, which `remarks` sum up.
    """
    hidden = ("seed", STEPS, EVALUATING, RESUME, KEPT, *HOURS)
    seeds: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in hidden}
        seeds.setdefault(tuple((shown | {TIME: _span(*_seconds([row]))}).items()), []).append(row["seed"])
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


def _of_text(study: StudyConfig, out: Path) -> list[str]:
    """Return the lines about a study of text."""
    cache = cache_of(study.text, out)
    verdicts = [*sparse(study), *expected_verdicts(study, find_prepared(study.text, cache))]
    return [
        *([TEST_SCALE] if study.scale == TEST else verdicts),
        *(f"Missing: {sentence}" for sentence in missing_inputs(study.text, cache)),
    ]


def _short_runs(study: StudyConfig) -> list[str]:
    """Return a warning for the architectures whose warm-up is as long as the run or longer."""
    found: dict[tuple[int, int], list[str]] = {}
    for run in plan_runs(study, study.vocabulary):
        if run.train.warmup >= run.timetable.steps > 1:
            names = found.setdefault((run.train.warmup, run.timetable.steps), [])
            names += [run.architecture] * (run.architecture not in names)
    return [
        f"Warning: train.warmup = {warmup} is not shorter than the run of {steps} steps: {', '.join(names)} will "
        f"warm up for {warmup_steps(warmup, steps)}; lower it or train longer."
        for (warmup, steps), names in found.items()
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


def expected_verdicts(study: StudyConfig, data: PreparedData | None) -> list[str]:
    """Return the half-width of intervals to expect, and a warning for each thing that may rule a verdict out.

    Args:
        study: the study.
        data: its text if that has been prepared; its documents are counted then.
    """
    if not study.text.ood:
        return ["Every domain is trained on: the report will state differences at equal training loss, no verdicts."]
    documents = _documents(study, data)
    impossible = [*_few_points(study), *_few_documents(study, documents)]
    warnings = (*impossible, *_few_runs(study), *_few_tokens(study, data))
    lines = [*(() if impossible else _expected(study, documents)), *(f"Warning: {sentence}" for sentence in warnings)]
    if data is None:
        lines.append(
            "Held-out documents are not counted, nor the work of evaluating them, as the text is not prepared: run "
            "`basecap data prepare`."
        )
    return lines


def _documents(study: StudyConfig, data: PreparedData | None) -> dict[str, DocumentSet]:
    """Return the documents by domain that gaps will be measured on, none while the text is not prepared."""
    splits = [
        found.config.split
        for found in plan_evaluations(study)
        if isinstance(found, DomainLoss) and found.declaration.name == EVALUATION
    ]
    domains = (*study.text.train, *study.text.ood)
    return {domain: data.sets[domain, split] for split in splits for domain in domains} if data else {}


def _noise(study: StudyConfig) -> Noise:
    return noise_of(study.train.tokens or study.length)


def _half_width(study: StudyConfig, runs: int, documents: int | None = None) -> float:
    """Return the half-width to expect with so many runs, and as many times those of the reference."""
    reference_runs = round(runs * len(study.seeds_of(study.reference)) / len(study.seeds))
    return expected_half_width(_noise(study), len(study.architectures) - 1, runs, reference_runs, documents)


def _expected(study: StudyConfig, documents: dict[str, DocumentSet]) -> Iterator[str]:
    fewest = min((_units(documents[domain]) for domain in study.text.ood if domain in documents), default=None)
    noise, runs = _noise(study), len(study.seeds)
    tolerance, half = expected_tolerance(noise, study.gap.cost), _half_width(study, runs, fewest)
    if len(study.architectures) == 1 or half == math.inf:
        return
    yield (
        f"Expected: intervals of +/- {half:.2g} nats, and {tolerance:.2g} nats for the gap that is tolerated "
        f"(gap.cost = {study.gap.cost:g}), if runs vary as those of {noise.study} do ({noise.size}): there by "
        f"{noise.domains[0]:g} nats on the quietest domain and {noise.domains[1]:g} on the noisiest."
    )
    enough = (more for more in range(runs, MOST_RUNS + 1) if _half_width(study, more, fewest) < tolerance)
    needed = next(enough, None)
    if needed != runs:
        count = f"about {needed}" if needed else f"more than {MOST_RUNS}"
        yield f"Only larger gaps will be decided; to show that an architecture has none takes {count} seeds."


def _units(documents: DocumentSet) -> int:
    """Return how many independent units documents are: clusters where those are enough to be drawn."""
    clusters = len(np.unique(documents.clusters))
    return clusters if clusters >= FEWEST_DOCUMENTS else max(1, len(documents))


def _few_points(study: StudyConfig) -> Iterator[str]:
    reference = next(entry for entry in study.architectures if entry.name == study.reference)
    points = Timetable(plan_training(study, reference), study.length).evaluations
    if points < FEWEST:
        yield (
            f"no verdict is possible with {points} evaluation point{'s' if points > 1 else ''}, as a curve needs "
            f"{FEWEST}; lower train.eval_every or leave it out."
        )


def _few_runs(study: StudyConfig) -> Iterator[str]:
    if _half_width(study, len(study.seeds)) == math.inf:
        yield (
            f"one seed and fewer than three runs of {study.reference}: verdicts will hold for the trained models only; "
            "set seeds=[0,1,2]."
        )


def _few_documents(study: StudyConfig, documents: dict[str, DocumentSet]) -> Iterator[str]:
    if not documents:
        return
    counts = {domain: len(found) for domain, found in documents.items()}
    counts["the training domains together"] = sum(counts[domain] for domain in study.text.train)
    needed = dict.fromkeys(counts, FEWEST_DOCUMENTS) | dict.fromkeys(study.text.train, FEWEST_OF_A_DOMAIN)
    few = [f"{counts[name]} of {name} (needed: {needed[name]})" for name in counts if counts[name] < needed[name]]
    if few:
        yield f"no verdict is possible with so few held-out documents: {', '.join(few)}; add text."


def _few_tokens(study: StudyConfig, data: PreparedData | None) -> Iterator[str]:
    size = data.tokenizer.vocab_size if data else {"bytes": BYTES, "bpe": study.text.vocab}.get(study.text.tokenizer)
    reference = next(entry for entry in study.architectures if entry.name == study.reference)
    tokens = plan_training(study, reference).tokens
    if size and tokens < LEAST_PER_ENTRY * size:
        yield (
            f"no verdict is possible where models end above the loss of a bigram model, as they may with fewer than "
            f"about {LEAST_PER_ENTRY} training tokens per entry of the vocabulary, here {tokens / size:.0f}; raise "
            f"train.tokens{' or lower data.vocab' if study.text.tokenizer == 'bpe' else ''}."
        )

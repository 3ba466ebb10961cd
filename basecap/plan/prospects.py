"""The verdicts to expect of a study, and warnings of what may rule them out."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from basecap.analysis.text.draws import FEWEST_DOCUMENTS, FEWEST_OF_A_DOMAIN, countable
from basecap.analysis.text.losses import EVALUATION
from basecap.analysis.text.power import MOST_RUNS, Noise, expected_half_width, expected_tolerance, noise_of
from basecap.analysis.text.reasons import TEST_SCALE
from basecap.data import DocumentSet, PreparedData, find_prepared, remote_inputs
from basecap.data.tokenizer import BYTES
from basecap.evals.domain_loss import DomainLoss
from basecap.mixers import ARCHITECTURES
from basecap.names import TEST
from basecap.plan.runs import Plan, RunSpec, plan_training
from basecap.plan.workloads import cache_of
from basecap.study.config import StudyConfig
from basecap.train.config import Timetable
from basecap.train.schedule import warmup_steps

#: Evaluation points that a curve needs between `gap.from` and the end: of the reference, and of any other architecture.
FEWEST_OF_THE_REFERENCE, FEWEST = 10, 4

#: Training tokens per entry of the vocabulary below which models may end above the loss of a bigram model. The
#: quickstart's reference ends above it after 390 and 584 per entry and below it after 779, in runs of that length;
#: models of limited-zoo, which see 7,300, went below it between 730 and 1,500.
LEAST_PER_ENTRY = 700


def prospects(plan: Plan, out: Path) -> list[str]:
    """Return what to expect of a study of text whose prepared text, if any, is that of the directory `out`."""
    study = plan.study
    cache = cache_of(study.text, out)
    rare = () if any(_few_points(study)) else sparse(study)  # that no verdict is possible says more
    verdicts = [*rare, *expected_verdicts(plan, find_prepared(study.text, cache))]
    return [
        *([TEST_SCALE] if study.scale == TEST else verdicts),
        *(f"From the network: {sentence}" for sentence in remote_inputs(study.text, cache)),
    ]


def _some(names: Sequence[str]) -> str:
    """List names, of many the first.

    >>> _some(["a", "b"]), _some([*"abcdef"])
    ('a, b', 'a, b, c and 3 more')
    """
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def short_runs(runs: Sequence[RunSpec]) -> list[str]:
    """Return a warning for the architectures whose warm-up is as long as the run or longer, one for each length."""
    found: dict[tuple[int, int], list[str]] = {}
    for run in runs:
        if run.train.warmup >= run.timetable.steps > 1:
            names = found.setdefault((run.train.warmup, run.timetable.steps), [])
            names += [run.architecture] * (run.architecture not in names)
    sentences = []
    for (warmup, steps), names in found.items():
        shorter = warmup_steps(warmup, steps)
        instead = f"warm up for {shorter} step{'' if shorter == 1 else 's'}" if shorter else "train without warm-up"
        sentences.append(
            f"Warning: train.warmup = {warmup} is not shorter than the run of {steps} steps: {_some(names)} will "
            f"{instead}; lower it or train longer."
        )
    return sentences


def cut_patterns(runs: Sequence[RunSpec]) -> list[str]:
    """Return a warning for each hybrid that is too shallow to have every kind of layer of its pattern."""
    found = dict[str, str]()
    for run in runs:
        depth, layers = run.model.depth, run.model.layers
        pattern: Sequence[object] = layers if len(layers) > 1 else ARCHITECTURES.get(layers[0].use).layers
        if any(kind not in pattern[:depth] for kind in pattern[depth:]):
            found[run.architecture] = (
                f"Warning: {run.architecture} has {depth} of the {len(pattern)} blocks of its pattern and so lacks a "
                f"kind of layer; set model.layers={len(pattern)} or more."
            )
    return [*found.values()]


def sparse(study: StudyConfig) -> list[str]:
    """Return a warning for the architectures that are evaluated too rarely for a curve."""
    found: dict[tuple[int, int, str], list[str]] = {}
    for entry in study.architectures:
        timetable = Timetable(plan_training(study, entry), study.length)
        points = timetable.evaluations_after(study.gap.start)
        needed = FEWEST_OF_THE_REFERENCE if entry.name == study.reference else FEWEST
        if points < needed:
            found.setdefault((points, needed, _more_points(timetable)), []).append(entry.name)
    return [
        f"Warning: too few evaluation points after gap.from = {study.gap.start:g} of the tokens, {points} where a "
        f"curve needs {needed}: {_some(names)}; {remedy}."
        for (points, needed, remedy), names in found.items()
    ]


def _more_points(timetable: Timetable) -> str:
    """Return how a curve gets more points; with schedule wsd they are the ends of its branches."""
    return "add budgets to train.branches" if timetable.branches else "lower train.eval_every or leave it out"


def expected_verdicts(plan: Plan, data: PreparedData | None) -> list[str]:
    """Return the half-width of intervals to expect, and a warning for each thing that may rule a verdict out.

    Args:
        plan: of a study of text.
        data: its text if that has been prepared; its documents are counted then.
    """
    study = plan.study
    if not study.text.ood:
        return ["Every domain is trained on: the report will state differences at equal training loss, no verdicts."]
    documents = _documents(plan, data)
    impossible = [*_few_points(study), *_few_documents(study, documents)]
    warnings = (*impossible, *_left_out(study, documents), *_few_runs(study), *_few_tokens(study, data))
    lines = [*(() if impossible else _expected(study, documents)), *(f"Warning: {sentence}" for sentence in warnings)]
    if data is None:
        lines.append(
            "Held-out documents are not counted, nor the work of evaluating them, as the text is not prepared: run "
            "`basecap data prepare`."
        )
    return lines


def _documents(plan: Plan, data: PreparedData | None) -> dict[str, DocumentSet]:
    """Return the documents by domain that gaps will be measured on, none while the text is not prepared."""
    splits = [
        found.config.split
        for found in plan.evaluations
        if isinstance(found, DomainLoss) and found.declaration.name == EVALUATION
    ]
    domains = (*plan.study.text.train, *plan.study.text.ood)
    return {domain: data.sets[domain, split] for split in splits for domain in domains} if data else {}


def _counted(study: StudyConfig, documents: dict[str, DocumentSet]) -> list[str]:
    """Return the unseen domains with documents enough for an interval; none while no documents are prepared."""
    return countable({name: len(documents.get(name, ())) for name in study.text.ood})


def _noise(study: StudyConfig) -> Noise:
    return noise_of(study.train.tokens or study.length)


def _half_width(study: StudyConfig, runs: int, documents: int | None = None) -> float:
    """Return the half-width to expect with so many runs, and as many times those of the reference."""
    reference_runs = round(runs * len(study.seeds_of(study.reference)) / len(study.seeds))
    return expected_half_width(_noise(study), len(study.architectures) - 1, runs, reference_runs, documents)


def _expected(study: StudyConfig, documents: dict[str, DocumentSet]) -> Iterator[str]:
    fewest = min((_units(documents[domain]) for domain in _counted(study, documents)), default=None)
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
        yield f"Only larger gaps will be decided; to show that an architecture has no gap takes {count} seeds."


def _units(documents: DocumentSet) -> int:
    """Return how many independent units documents are: clusters where those are enough to be drawn."""
    clusters = len(np.unique(documents.clusters))
    return clusters if clusters >= FEWEST_DOCUMENTS else max(1, len(documents))


def _few_points(study: StudyConfig) -> Iterator[str]:
    reference = next(entry for entry in study.architectures if entry.name == study.reference)
    timetable = Timetable(plan_training(study, reference), study.length)
    points = timetable.evaluations_after(0.0)
    if points < FEWEST:
        yield (
            f"no verdict is possible with {points} evaluation point{'s' if points > 1 else ''}, as a curve needs "
            f"{FEWEST}; {_more_points(timetable)}."
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
    unseen = [] if _counted(study, documents) else study.text.ood
    needed = dict.fromkeys(study.text.train, FEWEST_OF_A_DOMAIN) | dict.fromkeys(unseen, FEWEST_DOCUMENTS)
    counts[together := "the training domains together"] = sum(counts[domain] for domain in study.text.train)
    needed[together] = FEWEST_DOCUMENTS
    few = [f"{counts[name]} of {name} (needed: {needed[name]})" for name in needed if counts[name] < needed[name]]
    if few:
        yield f"no verdict is possible with so few held-out documents: {', '.join(few)}; add text."


def _left_out(study: StudyConfig, documents: dict[str, DocumentSet]) -> Iterator[str]:
    counted = _counted(study, documents)
    few = [f"{len(documents[name])} of {name}" for name in study.text.ood if counted and name not in counted]
    if few:
        which = f"domains with fewer than {FEWEST_DOCUMENTS} held-out documents"
        yield f"gaps leave out {which}: {', '.join(few)}; add text."


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

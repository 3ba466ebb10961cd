"""What verdicts a study can expect, before it runs."""

import math
from collections.abc import Iterator

import numpy as np

from basecap.analysis.draws import FEWEST_DOCUMENTS, FEWEST_OF_A_DOMAIN
from basecap.analysis.power import DOCUMENTS, MOST_RUNS, expected_half_width, expected_tolerance
from basecap.data import DocumentSet, PreparedData
from basecap.data.tokenizer import BYTES
from basecap.evals.domain_loss import DomainLoss
from basecap.study.config import StudyConfig
from basecap.study.plan import plan_evaluations, plan_training

#: Training tokens per entry of the vocabulary below which models may end above the loss of a bigram model. Models of
#: width 64 that saw 293 per entry ended close to it; those of limited-zoo, which see 7,300, went below it between
#: 730 and 1,500.
LEAST_PER_ENTRY = 300


def prospects(study: StudyConfig, data: PreparedData | None) -> list[str]:
    """Return the half-width of intervals to expect, and a warning for each thing that may rule a verdict out.

    Args:
        study: the study.
        data: its text where that has been prepared; without it nothing is said of documents.
    """
    if not study.text.ood:
        return ["Every domain is trained on: the report will state differences at equal training loss, no verdicts."]
    documents = _documents(study, data)
    warnings = (*_few_runs(study), *_few_documents(study, documents), *_few_tokens(study, data))
    return [*_expected(study, documents), *(f"Warning: {sentence}" for sentence in warnings)]


def _documents(study: StudyConfig, data: PreparedData | None) -> dict[str, DocumentSet]:
    """Return the documents by domain that gaps will be measured on, none while the text is not prepared."""
    splits = [found.config.split for found in plan_evaluations(study) if isinstance(found, DomainLoss)]
    domains = (*study.text.train, *study.text.ood)
    return {domain: data.sets[domain, split] for split in splits for domain in domains} if data else {}


def _half_width(study: StudyConfig, runs: int, documents: int = DOCUMENTS) -> float:
    """Return the half-width to expect with so many runs, and as many times those of the reference."""
    reference_runs = round(runs * len(study.seeds_of(study.reference)) / len(study.seeds))
    return expected_half_width(len(study.architectures) - 1, runs, reference_runs, documents)


def _expected(study: StudyConfig, documents: dict[str, DocumentSet]) -> Iterator[str]:
    fewest = min((_units(documents[domain]) for domain in study.text.ood if domain in documents), default=DOCUMENTS)
    runs, tolerance = len(study.seeds), expected_tolerance(study.gap.cost)
    half = _half_width(study, runs, fewest)
    if len(study.architectures) == 1 or half == math.inf:
        return
    yield (
        f"Expected: intervals of +/- {half:.2g} nats, and {tolerance:.2g} nats for the gap that is tolerated "
        f"(gap.cost = {study.gap.cost:g}), if runs vary as those of limited-zoo do (30M parameters, 60M tokens)."
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
            "train.tokens or lower data.vocab."
        )

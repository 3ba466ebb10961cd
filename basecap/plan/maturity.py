"""What a plan says of maturity: tokens per parameter, passes over the text, and the reference's expected transition."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from basecap.analysis.text.losses import COPYING
from basecap.analysis.text.maturity import measured_near
from basecap.names import TEST
from basecap.plan.runs import Plan, RunSpec
from basecap.records.evaluation_points import At, nearest_point
from basecap.study.config import StudyConfig

#: Tokens after which the reference of limited-zoo is past its transition, and its parameters: eight runs began to copy
#: after 35.8M tokens, and the transition ends after 2.4 times as many (results/limited-zoo-150M). Other sizes were not
#: measured.
PASSED, PARAMETERS = 86.0e6, 30e6
#: The same with 200M tokens of text in place of 28M (four runs, results/limited-zoo-midi).
PASSED_WITH_MORE_TEXT = 55.4e6
#: Passes over the text from which on a plan warns: in runs of limited-zoo the loss out of domain rose again after 4 to
#: 6 passes, the held-out loss after 6 to 8.
MOST_PASSES = 4.0


def maturity_warnings(plan: Plan, parameters: float, sizes: Sequence[int]) -> list[str]:
    """Return the tokens per parameter of the reference, and what may make a report too early or a reference overfit.

    Args:
        plan: of a study of text; nothing is said of one of tasks.
        parameters: of the reference.
        sizes: tokens of one pass over the training text; none where it is not prepared.
    """
    study = plan.study
    own = [run for run in plan.runs if run.architecture == study.reference]
    if study.task is not None or study.scale == TEST or not own:
        return []
    run = own[0]
    tokens = run.timetable.end * run.timetable.step_tokens
    line = f"{study.reference} trains on {_millions(tokens)} tokens, {_short(tokens / parameters, 2)} per parameter."
    warnings = [*_too_early(study, tokens, parameters), *_copying(plan, run), *_many_passes(plan.runs, sizes)]
    return [line, *(f"Warning: {sentence}" for sentence in warnings)]


def _too_early(study: StudyConfig, tokens: float, parameters: float) -> Iterator[str]:
    """Yield a warning of a budget below that of a reference that was mature, or one too small for its size."""
    if not study.text.ood:
        return
    needed = PASSED / study.gap.start
    if tokens < needed or tokens / parameters < needed / PARAMETERS:
        yield (
            f"the report may say early instead of a verdict: with gap.from = {study.gap.start:g} the reference of "
            f"limited-zoo (30M parameters, the only size measured) needs {_millions(needed)} tokens, "
            f"{_short(needed / PARAMETERS, 2)} per parameter, to learn to copy from context, and "
            f"{_millions(PASSED_WITH_MORE_TEXT / study.gap.start)} with seven times the text."
        )


def _copying(plan: Plan, run: RunSpec) -> Iterator[str]:
    """Yield a warning where the records will not tell whether the reference, one of whose runs is `run`, is mature."""
    if not plan.study.text.ood:
        return
    evaluated = run.timetable.tokens
    # Branches alone are compared, each at its end.
    points = [branch.tokens for branch in run.timetable.branches] or evaluated
    last = points if run.timetable.branches else points[-1:]
    measured = {
        tokens
        for each in plan.evaluations
        if each.declaration.name == COPYING
        for tokens in _points(each.config.at, last, evaluated)
    }
    end = run.timetable.end * run.timetable.step_tokens
    known = [
        [measured_near(np.array(some), tokens) for tokens in (plan.study.gap.start * end, end)]
        for some in (points, [tokens for tokens in points if tokens in measured])
    ]
    if known[0] != known[1]:
        yield (
            "no row will have a verdict, as copying is not evaluated where the trained range begins and ends, which "
            "tells whether the reference is past its transition; add copying to evals."
        )


def _points(at: At, last: Sequence[int], evaluated: Sequence[int]) -> Iterable[int]:
    """Return the tokens, of those `evaluated`, at which an evaluation runs; `last` are the ends of a run."""
    if isinstance(at, str):
        return evaluated if at == "every" else last
    return [nearest_point(tokens, evaluated) for tokens in at]


def _many_passes(runs: Sequence[RunSpec], sizes: Sequence[int]) -> Iterator[str]:
    for size in sizes:
        most = max(run.passes(size) for run in runs)
        if most >= MOST_PASSES:
            yield (
                f"runs read their training text {most:.2g} times; in runs of limited-zoo the loss on unseen domains "
                "rose again after 4 to 6 passes, and held-out loss, which ends the trained range, after 6 to 8."
            )


def _millions(tokens: float) -> str:
    """Return a number of tokens in short, such as "172M"; a small one in full."""
    return f"{tokens:,.0f}" if tokens < 1e5 else f"{_short(tokens / 1e6, 3)}M"


def _short(value: float, digits: int) -> str:
    """Return a number with so many digits and without an exponent, such as "100,000"."""
    return f"{float(f'{value:.{digits}g}'):,g}"

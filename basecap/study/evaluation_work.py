"""The work of evaluations beside that of training: with few training tokens they may take most of the time."""

from collections.abc import Sequence

from basecap.data import PreparedData
from basecap.evals import Evaluation
from basecap.evals.domain_loss import DomainLoss
from basecap.evaluation_points import includes
from basecap.study.plan import RunSpec

#: Work of a training step, forward and backward, beside that of the forward pass of an evaluation.
TRAINING = 3
#: Evaluations are announced that are as much work as training twice, and read as many tokens in a run.
HEAVY, MANY = 2, 1_000_000


def evaluation_work(
    runs: Sequence[RunSpec], evaluations: Sequence[Evaluation], data: PreparedData, only_heavy: bool = False
) -> list[str]:
    """Return a sentence about the run whose domain-loss is most work beside its training.

    Args:
        runs: of the study.
        evaluations: of the study.
        data: the text.
        only_heavy: whether to say nothing of evaluations that take little time, or less than training.
    """
    found = next((one for one in evaluations if isinstance(one, DomainLoss)), None)
    if found is None or not runs:
        return []
    read = found.predicted_tokens(data)
    points, share = max((_points(run, found) for run in runs), key=lambda pair: pair[1])
    work = read * share / TRAINING
    if only_heavy and (work < HEAVY or read * points < MANY):
        return []
    lower = "; lower data.max_test_tokens or max_document_tokens of domain-loss, or raise train.eval_every"
    where = f"{points} evaluation point{'' if points == 1 else 's'} of a run"
    return [
        f"Evaluations: domain-loss reads {read:,} held-out tokens at {where}, about {work:.2g} times the work of "
        f"training{lower if work >= 1 else ''}."
    ]


def _points(run: RunSpec, evaluation: DomainLoss) -> tuple[int, float]:
    """Return at how many points a run is evaluated, and that number by training token."""
    timetable, at = run.timetable, evaluation.config.at
    done = [(step * timetable.step_tokens, step == timetable.steps) for step in timetable.points]
    count = sum(includes(at, tokens, last) for tokens, last in done)
    return count, count / (timetable.steps * timetable.step_tokens)

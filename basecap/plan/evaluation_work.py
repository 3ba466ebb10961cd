"""The work of evaluations beside that of training: with few training tokens they may take most of the time."""

from collections.abc import Sequence
from dataclasses import dataclass

from basecap.evals import Evaluation
from basecap.models.outline import outline
from basecap.plan.checks import faults_of
from basecap.plan.runs import RunSpec
from basecap.plan.workloads import Workloads
from basecap.records.evaluation_points import includes

#: Work of a training step, forward and backward, beside that of the forward pass of an evaluation.
TRAINING = 3
#: Evaluations are heavy that are as much work as training twice, and read as many tokens in a run.
HEAVY, MANY = 2, 1_000_000
#: Less is only said to be less.
LEAST = 0.001


@dataclass(frozen=True, kw_only=True, order=True)
class Work:
    """What an evaluation takes in a run: as a multiple of training, the tokens it reads at a point, and its points."""

    relative: float
    tokens: int
    points: int

    @property
    def heavy(self) -> bool:
        """Whether it takes much longer than training, and not little."""
        return self.relative >= HEAVY and self.tokens * self.points >= MANY


def evaluation_work(runs: Sequence[RunSpec], evaluations: Sequence[Evaluation], workloads: Workloads) -> list[str]:
    """Return a sentence on the work of each evaluation, and one on those whose work is unknown.

    Args:
        runs: of the study.
        evaluations: of the study.
        workloads: what the runs train on; none for text that is not prepared, and what it decides is left out then.
    """
    most = [(evaluation, _most_work(runs, evaluation, workloads)) for evaluation in evaluations]
    unknown = [evaluation.declaration.name for evaluation, work in most if work is None]
    return [
        *(_sentence(evaluation, work) for evaluation, work in most if work is not None),
        *([f"Not counted: the work of {', '.join(unknown)}."] if unknown and workloads else []),
    ]


def heavy_work(runs: Sequence[RunSpec], evaluations: Sequence[Evaluation], workloads: Workloads) -> list[str]:
    """Return the sentences of `evaluation_work` on heavy evaluations."""
    most = [(evaluation, _most_work(runs, evaluation, workloads)) for evaluation in evaluations]
    return [_sentence(evaluation, work) for evaluation, work in most if work is not None and work.heavy]


def decoding_memory(runs: Sequence[RunSpec], evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence on the memory of each evaluation that lets models write: states, and tokens read at once."""
    sentences = []
    models = {run.architecture: outline(run.model) for run in runs}
    for evaluation in evaluations:
        with faults_of(evaluation):
            found = {name: evaluation.decoding(model) for name, model in models.items()}
        states = {
            name: (one.sequences * models[name].state_bytes(one.length), one) for name, one in found.items() if one
        }
        if not states:
            continue
        name, (size, most) = max(states.items(), key=lambda item: item[1][0])
        reading: dict[int, list[str]] = {}
        for other, (_, one) in states.items():
            reading.setdefault(one.read, []).append(other)
        listed = "; ".join(f"{read:,} by {', '.join(names)}" for read, names in sorted(reading.items()))
        sentences.append(
            f"Memory of {evaluation.declaration.name}: {most.sequences} decoding state"
            f"{'' if most.sequences == 1 else 's'} of {most.length:,} tokens take up to {size / 2**30:.3g} GiB in fp32 "
            f"({name}). Beside them are the activations of the tokens that are read at once: {listed}."
        )
    return sentences


def evaluation_shares(runs: Sequence[RunSpec], evaluations: Sequence[Evaluation], workloads: Workloads) -> list[float]:
    """Return the work of each run's evaluations as a multiple of that of its training, as far as it is known."""
    shares = [0.0] * len(runs)
    for evaluation in evaluations:
        for index, work in enumerate(works(runs, evaluation, workloads)):
            shares[index] += 0.0 if work is None else work.relative
    return shares


def _most_work(runs: Sequence[RunSpec], evaluation: Evaluation, workloads: Workloads) -> Work | None:
    """Return the work of an evaluation in the run where it is most beside training, None where it is unknown."""
    return max((work for work in works(runs, evaluation, workloads) if work is not None), default=None)


def works(runs: Sequence[RunSpec], evaluation: Evaluation, workloads: Workloads) -> list[Work | None]:
    """Return the work of an evaluation in each run, None where it is unknown, see `evaluation_work`."""
    read: dict[tuple[str | None, int], int | None] = {}
    found = []
    for run in runs:
        place = run.task, run.model.max_length
        if place not in read:
            with faults_of(evaluation):
                workload, length = workloads.get(run.task), run.model.max_length
                tokens = (
                    evaluation.most_tokens(length) if workload is None else evaluation.tokens_read(workload, length)
                )
                read[place] = None if tokens is None else int(tokens)
        found.append(None if (tokens := read[place]) is None else _work(run, evaluation, tokens))
    return found


def _work(run: RunSpec, evaluation: Evaluation, tokens: int) -> Work:
    timetable = run.timetable
    done = timetable.tokens
    at, branches = evaluation.config.at, [branch.tokens for branch in timetable.branches]
    trunk = [step * timetable.step_tokens for step in timetable.points]
    points = sum(includes(at, point, done) for point in trunk)
    points += sum(at == "end" or includes(at, point, done) for point in branches)
    trained = timetable.trained_steps * timetable.step_tokens
    return Work(relative=tokens * points / (TRAINING * trained), tokens=tokens, points=points)


def _sentence(evaluation: Evaluation, work: Work) -> str:
    ways = [f"lower {evaluation.reduced_by}"] if evaluation.reduced_by else []
    ways += ["raise train.eval_every"] if work.points > 1 else []
    share = f"about {work.relative:.2g}" if work.relative >= LEAST else f"less than {LEAST}"
    return (
        f"Evaluations: {evaluation.declaration.name} reads {work.tokens:,} tokens at {work.points} evaluation "
        f"point{'' if work.points == 1 else 's'} of a run, {share} times the work of training"
        f"{'; ' + ', or '.join(ways) if work.relative >= 1 and ways else ''}."
    )

"""What must hold of a study before anything is prepared or trained: its models, batches, evaluations and their data."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

from basecap.data import known_tokenizer
from basecap.errors import BasecapError, ConfigError
from basecap.evals import Evaluation, refuse_positions
from basecap.evals.recall import Recall
from basecap.models.outline import outline
from basecap.plan.runs import Plan, RunSpec, costs, plan_study
from basecap.plan.workloads import Tasks, Workloads
from basecap.plugins import place_in_plugins
from basecap.study.config import StudyConfig
from basecap.train.distributed import SharedError, error_sentence


def check(study: StudyConfig, world: int = 1) -> Plan:
    """Build every model of the study without memory and every evaluation; raises ConfigError.

    It plans what this command names, before text is prepared, which may take hours. What is then run is planned again:
    the vocabulary may shrink to that of the text, and the directory may hold more seeds and learning rates.

    Args:
        study: the study.
        world: the processes among which batches must divide.

    Returns:
        The plan, with the vocabulary that the study asks for: that of the data may be smaller.
    """
    plan = plan_study(study, study.vocabulary)
    check_options(plan.evaluations)
    costs(plan.runs)
    stops = any(isinstance(found, Recall) and found.config.at == "every" for found in plan.evaluations)
    for run in plan.runs:
        run.train.forward_batch(world)
        run.train.mesh(world)
        if run.train.stop_at is not None and not stops:
            raise ConfigError("train.stop_at needs the evaluation recall at every evaluation point; add it to evals.")
    if study.task is not None:  # tasks need no preparation
        check_evaluations(study, plan.evaluations, Tasks(study.task).workloads())
    elif any(type(found).check_tokens is not Evaluation.check_tokens for found in plan.evaluations):
        tokenizer = known_tokenizer(study.text.tokenizer)
        for found in plan.evaluations:
            with faults_of(found):
                found.check_tokens(tokenizer, study.length)
    _refuse_positions(plan.runs, [one for one in plan.evaluations if type(one).decoding is not Evaluation.decoding])
    return plan


def check_options(evaluations: Iterable[Evaluation]) -> None:
    """Raise ConfigError when options of an evaluation name what does not exist."""
    for evaluation in evaluations:
        with faults_of(evaluation):
            evaluation.check_options()


def _refuse_positions(runs: Sequence[RunSpec], writers: Sequence[Evaluation]) -> None:
    """Raise ConfigError for a model with parameters for fewer positions than it has to write for an evaluation."""
    models = {run.architecture: outline(run.model) for run in runs} if writers else {}
    for evaluation, (name, model) in itertools.product(writers, models.items()):
        with faults_of(evaluation):
            decoding = evaluation.decoding(model)
        if decoding is not None:
            try:
                refuse_positions(evaluation.declaration.name, model, decoding.length)
            except ConfigError as error:
                raise ConfigError(f"architecture {name!r}: {error}") from error


def check_evaluations(study: StudyConfig, evaluations: Sequence[Evaluation], workloads: Workloads) -> None:
    """Raise DataError when what runs train on does not hold what an evaluation measures."""
    for evaluation, workload in itertools.product(evaluations, workloads.values()):
        with faults_of(evaluation):
            evaluation.check(workload, study.length)


@contextlib.contextmanager
def faults_of(evaluation: Evaluation) -> Iterator[None]:
    """Raise ConfigError with the name of the evaluation for what its code may raise before anything is measured."""
    try:
        yield
    except BasecapError:
        raise
    except Exception as error:  # other people's code may raise anything
        name, message = evaluation.declaration.name, message_with_place(error)
        raise ConfigError(
            f"evaluation {name!r} fails: {message.rstrip('.')}; fix it, or remove it from evals."
        ) from error


def message_with_place(error: BaseException) -> str:
    """Return the message of any error, with " (FILE:LINE)" of the last line of a plugin that it came through, if any.

    The line may also be in a file beside a plugin.
    """
    place = place_in_plugins(error.__cause__ if isinstance(error, SharedError) and error.__cause__ else error)
    return error_sentence(error) + (f" ({place})" if place else "")

"""An evaluation job: one model, measured and recorded."""

from dataclasses import dataclass, replace

import torch

from basecap.evals import Context, Evaluation, Outcome, SharedEvaluation
from basecap.models.language_model import LanguageModel
from basecap.records import Record, RunRecords
from basecap.train.distributed import Processes
from basecap.train.loop import run_interruptible


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is evaluated: a model on the context's device, after how many steps and tokens, and where that is recorded.

    All processes of `group` evaluate it together.
    """

    model: LanguageModel
    step: int
    tokens: int
    context: Context
    records: RunRecords
    group: Processes


def evaluate(evaluation: Evaluation, checkpoint: Checkpoint) -> None:
    """Measure a model and record what was found; all processes share what can be shared, else the leading one works."""
    group, context = checkpoint.group, checkpoint.context
    context.note(f"evaluating {evaluation.declaration.name}")
    if isinstance(evaluation, SharedEvaluation) and group.world > 1:
        own = replace(context, rank=group.rank, world=group.world)
        parts = run_interruptible(group, lambda: _measure(evaluation, checkpoint.model, own))
        group.run_on_leader(lambda: _record(evaluation, evaluation.join(parts), checkpoint))
    else:

        def alone() -> None:
            _record(evaluation, _measure(evaluation, checkpoint.model, context), checkpoint)

        run_interruptible(group, alone if group.is_leader else lambda: None)


def _measure(evaluation: Evaluation, model: LanguageModel, context: Context) -> Outcome:
    with torch.no_grad():
        return evaluation.run(model, context)


def _record(evaluation: Evaluation, outcome: Outcome, checkpoint: Checkpoint) -> None:
    name, records, step = evaluation.declaration.name, checkpoint.records, checkpoint.step
    if outcome.documents:
        records.write_documents(name, step, outcome.documents)
    for number, maps in enumerate(outcome.maps):
        records.write_maps(name if len(outcome.maps) == 1 else f"{name}-{number}", step, maps)
    records.append_evals(
        Record(
            step=step,
            tokens=checkpoint.tokens,
            eval=name,
            subset=found.subset,
            metric=found.metric,
            value=found.value,
            n=found.n,
            stderr=found.stderr,
            axis=found.axis,
        )
        for found in outcome.measurements
    )
    if not outcome.measurements:
        records.add_unmeasured(name)

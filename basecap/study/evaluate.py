"""An evaluation job: one model, measured and recorded."""

from collections.abc import Iterable

import torch

from basecap.evals._contract import Context, Evaluation
from basecap.models.language_model import LanguageModel
from basecap.records import Record, RunRecords


def evaluate(
    evaluations: Iterable[Evaluation],
    model: LanguageModel,
    context: Context,
    records: RunRecords,
    step: int,
    tokens: int,
) -> None:
    """Measure a model that is on the context's device and record what was found after `step` steps."""
    for evaluation in evaluations:
        name = evaluation.declaration.name
        with torch.no_grad():
            outcome = evaluation.run(model, context)
        if outcome.documents:
            records.write_documents(name, step, outcome.documents)
        records.append_evals(
            Record(
                step=step,
                tokens=tokens,
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

"""Evaluations of models that were trained elsewhere, on the text of the study that they were imported into."""

from functools import partial
from pathlib import Path

import torch

from basecap.data.workload import Workload
from basecap.errors import LostDirectory
from basecap.evals import Context
from basecap.plan.checks import faults_of
from basecap.plan.workloads import data_with
from basecap.records import RunRecords
from basecap.run.evaluation_job import EvaluatedModel, evaluate, is_measured, measured
from basecap.run.jobs import JobFailure, Runtime, describe_failure, report_failure
from basecap.study.config import StudyConfig
from basecap.system.files import real_path
from basecap.train.checkpoint import load_stored, stored
from basecap.train.placement import DevicePlacement


def evaluate_imported(study: StudyConfig, runtime: Runtime, path: Path | None = None) -> int:
    """Evaluate imported models where an evaluation has no numbers; return how many failed, each of which is logged.

    All processes of the group measure each model together.

    Args:
        study: that they were imported into.
        runtime: of this process.
        path: the directory of the only model to evaluate; None: all of them.
    """
    failed, every = 0, runtime.records.imported()
    for records in every if path is None else [one for one in every if real_path(one.path) == real_path(path)]:
        failures = _evaluate(records, study, runtime)
        for name, failure in failures.items() if runtime.group.is_leader else ():
            report_failure(f"{name} of {records.path.name} failed", failure, runtime.log)
        failed += len(failures)
    return failed


def _evaluate(records: RunRecords, study: StudyConfig, runtime: Runtime) -> dict[str, JobFailure]:
    """Return the evaluations of a model that failed."""
    info, failures = records.info(), dict[str, JobFailure]()
    data = runtime.workloads[None]
    if info is not None and info.origin.get("tokenizer") == "own":
        opened: list[Workload] = []
        own = partial(data_with, study, runtime.records.path, records.tokenizer)
        runtime.group.run_on_leader(own)  # prepares it
        runtime.group.run_on_all(lambda: opened.append(own()))
        (data,) = opened
    done, empty = measured(records), records.unmeasured()
    due = [
        found
        for found in runtime.evaluations
        if found.declaration.name not in empty and not is_measured(found, 0, done, data)
    ]
    if not due:
        return failures
    placement = DevicePlacement.choose(runtime.device, runtime.group, study.train.precision)
    context = Context(data=data, device=runtime.device, autocast=placement.autocast, note=lambda words: None)
    for evaluation in due:
        try:
            with faults_of(evaluation):
                evaluation.check(data, study.length)
            model = load_stored(stored(records.weights)[0]).to(runtime.device)
            evaluated = EvaluatedModel(
                model=model, step=0, tokens=0, context=context, records=records, group=runtime.group
            )
            with torch.no_grad():
                evaluate(evaluation, evaluated)
        except LostDirectory:
            raise
        except Exception as error:  # a fault of one evaluation must not cost the others
            failures[evaluation.declaration.name] = describe_failure(error, runtime.device)
    return failures

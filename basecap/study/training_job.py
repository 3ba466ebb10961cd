"""A training job: one run of a study, from its last checkpoint to its end or to the record of why it failed."""

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from basecap.errors import BasecapError, TrainingError
from basecap.evals import Context, Evaluation, includes
from basecap.models.language_model import LanguageModel
from basecap.ops import IMPLEMENTATIONS
from basecap.records import RunRecords, StudyRecords
from basecap.registry import PLUGIN
from basecap.study.config import StudyConfig
from basecap.study.evaluation_job import Checkpoint, evaluate
from basecap.study.plan import RunSpec
from basecap.study.provenance import starting_info
from basecap.study.sweep import held_out_loss
from basecap.study.workloads import Workloads
from basecap.train.distributed import Processes, SharedError, error_sentence
from basecap.train.loop import DevicePlacement, Trainer

logger = logging.getLogger("basecap.study")

#: The metric that train.stop_at is about.
VALIDATION = "validation_accuracy"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What every run of a study shares. It crosses process boundaries, so it holds no open file and no tensor."""

    study: StudyConfig
    out: Path
    device: str
    plugins: tuple[Path, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the jobs of a study use within one process.

    Attributes:
        records: of the study.
        device: where models are.
        workloads: what they train on and are tested on.
        evaluations: what is measured at evaluation points.
        group: the processes that train each run together.
        log: takes sentences for the terminal.
    """

    records: StudyRecords
    device: torch.device
    workloads: Workloads
    evaluations: Sequence[Evaluation]
    group: Processes
    log: Callable[[str], None]

    def run_records(self, run: RunSpec) -> RunRecords:
        """Return the records of a run; touches no file."""
        return self.records.run(run.name, run.seed, run.rate)


def train_run(run: RunSpec, runtime: Runtime) -> dict[str, Any]:
    """Train one run unless it is finished, and return its info; a failure is recorded and said, not raised.

    An error in one of several processes alone is raised: the others wait for it in the middle of a step, and `torchrun`
    ends them all.
    """
    records, group = runtime.run_records(run), runtime.group
    info = records.info()
    if info.get("status") == "finished":
        return info
    IMPLEMENTATIONS.clear()
    info = starting_info(records, run, runtime.device)
    group.run_on_leader(lambda: records.write_info(info))
    alone: Exception | None = None
    try:
        info |= _train(run, runtime, records)
        info["status"] = "finished"
    except Exception as error:  # a bug in one mixer must not cost the other runs; the trace is kept with the run
        message, trace = failure_words(error)
        info |= {"status": "failed", "message": message}
        info["diverged"] = isinstance(error, TrainingError) and not isinstance(error, SharedError)
        if trace is not None:
            info["traceback"] = trace
        alone = None if group.world == 1 or isinstance(error, TrainingError) else error
    info["ops"] = dict(sorted(IMPLEMENTATIONS.items()))
    if alone is not None:
        _leave(records, run, info, runtime)
        raise alone
    if group.is_leader:
        records.write_info(info)
        if info["status"] == "failed":
            report_failure(f"{run.label} failed", info["message"], info.get("traceback"), runtime.log)
    return info


def failure_words(error: Exception) -> tuple[str, str | None]:
    """Return what is said of an error that is being handled, and its trace unless the sentence says all."""
    expected = isinstance(error.__cause__ if isinstance(error, SharedError) else error, BasecapError | None)
    return error_sentence(error) + _plugin_line(error), None if expected else traceback.format_exc()


def report_failure(what: str, message: str, trace: str | None, log: Callable[[str], None]) -> None:
    """Say why something failed, and log its trace for --debug."""
    log(f"{what}: {message}")
    if trace is not None:
        logger.debug(trace)


def _plugin_line(error: Exception) -> str:
    """Return " (FILE:LINE)" of the last line of a plugin that an error came through, else nothing."""
    files = [getattr(module, "__file__", None) for name, module in [*sys.modules.items()] if name.startswith(PLUGIN)]
    cause = error.__cause__ if isinstance(error, SharedError) and error.__cause__ else error
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _leave(records: RunRecords, run: RunSpec, info: dict[str, Any], runtime: Runtime) -> None:
    """Record and say what failed in this process, unless another was first: then this one fails for its absence."""
    if records.info().get("status") != "failed":
        records.write_info(info)
        where = f"in process {runtime.group.rank}, which ends them all (--only runs the others)"
        runtime.log(f"{run.label} failed {where}: {info['message']}")


def _train(run: RunSpec, runtime: Runtime, records: RunRecords) -> dict[str, Any]:
    """Train a run to its end, evaluating as it goes; return the parameters of its model and where it stopped early."""
    device, workload = runtime.device, runtime.workloads[run.task]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    placement = DevicePlacement.choose(device, runtime.group, run.train.precision)
    model = LanguageModel(run.model, checkpointing=run.train.checkpointing).initialise(run.seed)
    trainer = Trainer(model, run.train, run.seed, workload=workload, records=records, placement=placement)
    context = Context(data=workload, device=device, autocast=placement.autocast, note=trainer.note)

    def evaluate_point(model: LanguageModel, step: int, tokens: int) -> bool:
        point = Checkpoint(model=model, step=step, tokens=tokens, context=context, records=records, group=runtime.group)
        last = step == run.timetable.steps
        due = [found for found in runtime.evaluations if includes(found.config.at, tokens, last)]
        for evaluation in due:
            evaluate(evaluation, point)
        ended = not last and runtime.group.run_on_leader(lambda: _good_enough(run, records, step))
        rest = [found for found in runtime.evaluations if ended and found.config.at == "end"]
        if run.sweep and (last or ended):
            rest.append(held_out_loss(run.task))
        for evaluation in rest:
            evaluate(evaluation, point)
        return ended

    stopped = trainer.run(run.label, evaluate_point, runtime.log)
    if stopped is None:
        return {"parameters": model.parameters_count()}
    reason = f"validation accuracy has reached {run.train.stop_at:g} (train.stop_at)"
    runtime.log(f"{run.label}: ended after step {stopped} of {run.timetable.steps}, as {reason}.")
    return {"parameters": model.parameters_count(), "stopped": stopped}


def _good_enough(run: RunSpec, records: RunRecords, step: int) -> bool:
    """Whether the mean validation accuracy over the cells of a run's task ends it at this evaluation point."""
    if run.train.stop_at is None:
        return False
    found = [record.value for record in records.evals() if (record.step, record.metric) == (step, VALIDATION)]
    return bool(found) and sum(found) / len(found) >= run.train.stop_at

"""What a task of a Slurm job runs: the runs or evaluation points of its part of a batch, see `_slurm_batch`."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from basecap.data import DataConfig, prepare
from basecap.errors import BasecapError, ConfigError, Interrupted
from basecap.plan.runs import Plan, RunSpec, plan_study
from basecap.plan.workloads import material_of, vocabulary_of
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.run.evaluation_job import StoredPoint
from basecap.run.executors import _slurm_commands as slurm
from basecap.run.executors._contract import EXECUTORS, Executor, devices_for
from basecap.run.executors._slurm_batch import SlurmBatch
from basecap.run.jobs import Execution, Runtime
from basecap.run.provenance import refuse_other_precision
from basecap.run.resources import Resources
from basecap.run.sweep import chosen_rates
from basecap.study.config import restrict
from basecap.study.merge import held_study
from basecap.system import environment
from basecap.system.progress import write_line
from basecap.train.distributed import Processes
from basecap.train.interruption import listening


def work(batch: SlurmBatch, index: int) -> dict[str, Any]:
    """Do the items of a task; return its answer."""
    content = batch.content
    items, kind = content["tasks"][index], content["kind"]
    records = StudyRecords(batch.path.parents[1])
    on = Resources(device=content["device"], per_device=content["per_device"])
    plugins = {Path(path): digest for path, digest in content["plugins"].items()}
    for path, digest in plugins.items():
        load_plugin(path, digest)
    if kind == "prepare":
        return _prepare(items)
    with records.entered():
        device = environment.choose_device(on.device)
        steps = content["profile"]
        profile = None if steps is None else (int(steps[0]), int(steps[1]))
        study, plan, runtime = _plan(records, items, device)
        runtime = replace(runtime, profile=profile)
        runs = _found(plan, items)
        refuse_other_precision(records, study, runs, device)
        devices = devices_for(device, on, 1)
        execution = Execution(
            study=study, out=records.path, device=str(device), plugins=plugins, on=on, profile=profile
        )
        with EXECUTORS.get("local")(execution, runtime, devices if len(items) > 1 else devices[:1]) as executor:
            return _answer(kind, items, runs, executor, runtime)


def _prepare(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Prepare a text together with the other tasks, which are given the same."""
    (item,) = items
    prepare(DataConfig(**item["data"]), Path(item["cache"]))
    return {"items": {item["key"]: "prepared"}}


def _plan(records: StudyRecords, items: Sequence[dict[str, Any]], device: torch.device) -> tuple[Any, Plan, Runtime]:
    """Return the study of a directory, the plan of these items' architectures, and what jobs use here."""
    study = held_study(records)
    workloads = material_of(study, records.path).workloads()
    names = {item["architecture"] for item in items}
    plan = plan_study(restrict(study, names), vocabulary_of(workloads), chosen_rates(records))
    runtime = Runtime(
        records=records,
        device=device,
        workloads=workloads,
        evaluations=plan.evaluations,
        group=Processes(),
        log=write_line,
    )
    return study, plan, runtime


def _found(plan: Plan, items: Iterable[dict[str, Any]]) -> list[RunSpec]:
    """Return the run of each item; raises ConfigError where the study has changed."""
    runs = {(run.name, run.seed, run.rate): run for run in plan.runs}
    found = [runs.get(tuple(item["run"])) for item in items]
    for run, item in zip(found, items, strict=True):
        if run is None or run.hash != item["hash"]:
            raise ConfigError(f"{item['key']} has changed since its job was submitted; run the same command again.")
    return [run for run in found if run is not None]


def _answer(
    kind: str, items: Sequence[dict[str, Any]], runs: Sequence[RunSpec], executor: Executor, runtime: Runtime
) -> dict[str, Any]:
    """Do the items; return what their jobs returned, by key."""
    if kind == "try":
        if not runtime.records.runs() and not runtime.records.runs(sweep=True):
            with runtime.records.locked():
                held = runtime.records.environment()
                runtime.records.write_environment({**held, **environment.describe(runtime.device)})
        return {"items": {run.label: asdict(trial) for run, trial in executor.attempt(runs)}}
    if kind == "train":
        return {"items": {run.label: info.status for run, info in zip(runs, executor.train(runs), strict=True)}}
    points = [
        StoredPoint(
            run=run,
            step=item["step"],
            tokens=item["tokens"],
            weights=None if item["weights"] is None else Path(item["weights"]),
            evaluations=tuple(item["evaluations"]),
            branch=item["branch"],
        )
        for item, run in zip(items, runs, strict=True)
    ]
    keys = {id(point): item["key"] for point, item in zip(points, items, strict=True)}
    done = executor.evaluate(points, lambda words: None)
    found = {keys[id(point)]: {name: asdict(one) for name, one in failures.items()} for point, failures in done}
    return {"items": found}


def main(path: str, index: str, task: str) -> int:
    """Do a task and write its answer; after a signal, which comes before the time limit, put it back into the queue.

    Args:
        path: the directory of the batch.
        index: which of its tasks.
        task: that task to Slurm, such as 7_3.
    """
    batch, number = SlurmBatch(Path(path)), int(index)
    with listening(once=True):
        try:
            answer = work(batch, number)
        except Interrupted as stopped:
            write_line(str(stopped))
            with contextlib.suppress(OSError):
                if slurm.requeue(task):
                    write_line("The time limit is near: the job was put back into the queue, where it resumes.")
            return 128 + stopped.number
        except BasecapError as error:
            write_line(f"error: {error}")
            batch.write_answer(number, {"error": str(error)})
            return 2
    batch.write_answer(number, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run a study: prepare the data, train what is not finished, keep what failed from stopping the rest."""

import contextlib
import logging
import multiprocessing
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from basecap import environment
from basecap.analysis.losses import load
from basecap.data import PreparedData, bigram_loss, check_text, check_vocabulary
from basecap.errors import BasecapError, ConfigError, Interrupted, TrainingError
from basecap.evals._contract import Context, Evaluation
from basecap.models.language_model import LanguageModel
from basecap.ops._dispatch import IMPLEMENTATIONS
from basecap.processes import end_with_parent
from basecap.records import Record, RunRecords, StudyRecords
from basecap.registry import PLUGIN, load_plugin
from basecap.study.config import StudyConfig, validate
from basecap.study.growth import grown
from basecap.study.plan import RunSpec, cost, plan_evaluations, plan_runs
from basecap.study.preparing import cache_of, data_of
from basecap.study.proof import refuse_unsound
from basecap.study.provenance import begun, refuse_other, refuse_other_precision
from basecap.study.sweep import HeldOutLoss, chosen_rates, settle
from basecap.study.trial import try_all, untried
from basecap.train.distributed import Processes, SharedError, processes, sentence
from basecap.train.interruption import deferred, install, listening
from basecap.train.loop import Place, Trainer

logger = logging.getLogger("basecap.study")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What every run of a study shares. It crosses process boundaries, so it holds no open file and no tensor."""

    study: StudyConfig
    out: Path
    device: str
    plugins: tuple[Path, ...] = ()


def execute(
    study: StudyConfig,
    out: Path,
    *,
    only: set[str],
    device: str | None,
    plugins: Sequence[Path],
    say: Callable[[str], None],
    per_gpu: int = 1,
) -> list[dict[str, Any]]:
    """Train every selected run of `study` into `out`, resuming what stands there; return each run's info.

    Of a sweep of learning rates these are the runs with the chosen rates, and those whose failure left no choice.

    Started by `torchrun`, all processes train each run together and only the leading one returns something; else runs
    go one after the other on one device, or side by side on the GPUs of this machine when there are several, `per_gpu`
    on each: a small model leaves room for others.

    Raises:
        ConfigError: names, sizes or options that do not work, a plugin's architecture that sees the future (before
            anything is written), or a directory that holds another study.
        DataError: text that cannot be prepared, or results of runs whose records are not there.
        Interrupted: SIGINT or SIGTERM came; the run that was training wrote a checkpoint first.
        TrainingError: either of these in the leading one of several processes, raised in all of them.
        Exception: what failed in one of several processes alone, after it was recorded.
    """
    chosen = environment.choose_device(device)
    with listening(), processes(chosen) as group, contextlib.ExitStack() as held:
        check(study, group.world)
        devices = places(chosen, device, group.world, per_gpu)
        execution = Execution(study=study, out=out, device=str(chosen), plugins=tuple(plugins))
        group.lead(lambda: _begin(execution, only, held))
        data = data_of(study, out)

        def train(runs: Sequence[RunSpec]) -> list[dict[str, Any]]:
            if len(devices) > 1 and len(runs) > 1:
                return side_by_side(execution, runs, devices, say)
            infos = []
            for run in runs:
                with deferred():  # a signal waits for a checkpoint, or for the record that the run is finished
                    infos.append(_attempt(execution, run, data, group, say))
            return infos

        known = _runs(execution, data, only)
        failed = group.together(lambda: _try(execution, known, data, group, say) if group.leads else [])[0]
        unsound = {info["name"] for info in failed}
        swept = [run for run in known if run.sweep and run.name not in unsound]
        tried = train(swept)
        if study.train.sweep:
            group.together(lambda: None)  # every process has read what is about to move
            group.lead(lambda: settle(StudyRecords(out), swept, say))
        runs = [run for run in _runs(execution, data, only) if run.name not in unsound]
        unchosen = {run.name for run in runs if run.sweep}
        failed += [info for info in tried if info["status"] == "failed" and info["name"] in unchosen]
        infos = failed + train([run for run in runs if not run.sweep])
        return infos if group.leads else []


def places(chosen: torch.device, asked: str | None, world: int, per_gpu: int) -> list[str]:
    """Return where the runs of this process go, a device for each that goes at a time; the GPUs take turns."""
    if per_gpu > 1 and (chosen.type != "cuda" or world > 1):
        where = "under torchrun" if world > 1 else f"on {chosen}"
        raise ConfigError(f"several runs at a time share a GPU; {where} leave out --per-gpu.")
    every = chosen.type == "cuda" and asked is None and world == 1
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if every else [str(chosen)]
    return devices * per_gpu


def _begin(execution: Execution, only: set[str], held: contextlib.ExitStack) -> None:
    """Prepare the data, make the directory this study's and keep other processes out for as long as `held` is.

    What is refused leaves study.yaml as it was: nobody could take an architecture out of it again.
    """
    records, study, device = StudyRecords(execution.out), execution.study, torch.device(execution.device)
    records.refuse_foreign()
    records.refuse_loss()
    _whole(records, study)
    _refuse_damaged(records, study)
    refuse_unsound([run for run in plan_runs(study, study.data.vocab) if run.name in only], device)
    check_text(study.data, cache_of(study, records.path))
    held.enter_context(records.locked())
    prepared = data_of(study, records.path)  # may fail: the directory is not yet this study's
    if study.model.vocab is not None:
        check_vocabulary(study.model.vocab, prepared.tokenizer)
    _refuse_other_data(records, prepared)
    for evaluation in plan_evaluations(study):
        evaluation.check(prepared, study.data.seq_len)
    whole, runs = _whole(records, study), _runs(execution, prepared, only)
    for run in runs:
        refuse_other(records.run(run.name, run.seed, run.rate), run)
    refuse_other_precision(records, whole, runs, device)
    records.create(whole.model_dump(mode="json"))
    _write_surroundings(records, study, prepared, device)


def _refuse_damaged(records: StudyRecords, study: StudyConfig) -> None:
    """Raise DataError when what earlier runs recorded cannot be read, which the report would say after training."""
    for run in records.runs():
        load(run, run.evals(), run.metrics(), (*study.data.train, *study.data.ood))


def _runs(execution: Execution, data: PreparedData, only: set[str]) -> list[RunSpec]:
    """Return the selected runs as far as they are known; a sweep has the first seed of those in the directory."""
    records, study = StudyRecords(execution.out), execution.study
    runs = plan_runs(_whole(records, study), data.tokenizer.vocab_size, chosen_rates(records))
    return [run for run in runs if run.name in only and (run.sweep or run.seed in study.seeds_of(run.name))]


def _try(
    execution: Execution, runs: Sequence[RunSpec], data: PreparedData, group: Processes, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Try each architecture that has not begun; record and say what fails, and return the infos of its runs."""
    study, device = StudyRecords(execution.out), torch.device(execution.device)
    failures = try_all(untried(runs, study), plan_evaluations(execution.study), data, group, device)
    infos = []
    for run in (run for run in runs if run.name in failures):
        failure, records = failures[run.name], study.run(run.name, run.seed, run.rate)
        info = {**begun(records, run, device), "status": "failed", "message": failure.message, "ops": failure.ops}
        if failure.traceback is not None:
            info["traceback"] = failure.traceback
        records.write_info(info)
        infos.append(info)
    for name, failure in failures.items():
        _report_failure(f"{name} failed before training", failure.message, failure.traceback, say)
    return infos


def _report_failure(what: str, message: str, trace: str | None, say: Callable[[str], None]) -> None:
    say(f"{what}: {message}")
    if trace is not None:
        logger.debug(trace)


def _whole(records: StudyRecords, study: StudyConfig) -> StudyConfig:
    """Return what the directory holds with this study: an earlier one's seeds and architectures too."""
    if not records.begun:
        return study
    return grown(validate(records.study(), str(records.path / "study.yaml")), study, records.path)


def check(study: StudyConfig, world: int = 1) -> None:
    """Build every model of the study without memory and every evaluation; raises ConfigError.

    Args:
        study: the study.
        world: the processes among which batches must divide.
    """
    for run in plan_runs(study, study.data.vocab):
        cost(run)
        run.train.forward_batch(world)
    plan_evaluations(study)


def recorded_data(study: StudyConfig, out: Path) -> PreparedData:
    """Return the data that the study in `out` was run with; raises ConfigError when its text has changed."""
    data = data_of(study, out)
    _refuse_other_data(StudyRecords(out), data)
    return data


def _refuse_other_data(records: StudyRecords, data: PreparedData) -> None:
    held = records.environment().get("data")
    if held not in (None, data.manifest_hash):
        raise ConfigError(
            f"{records.path} was begun with other data (manifest {held}, now {data.manifest_hash}); restore the text, "
            "or run into another --out."
        )


def _write_surroundings(records: StudyRecords, study: StudyConfig, data: PreparedData, device: torch.device) -> None:
    held = records.environment()
    machine = (
        held if held and (records.runs() or records.runs(sweep=True)) else environment.describe(device)
    )  # numbers stay with their machine
    text = {"overlap": data.overlap_rows(), "text_note": data.remark}
    found = {**machine, "data": data.manifest_hash, "bigram_loss": bigram_loss(data, study.data.seq_len), **text}
    if found != held:
        records.write_environment(found)
    records.write_declarations(evaluation.declaration for evaluation in plan_evaluations(study))


def side_by_side(
    execution: Execution, runs: Sequence[RunSpec], devices: Sequence[str], say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Run in one process per device; a process takes the next run when it has finished one. Returns each run's info.

    A process that is killed costs its own run alone, which is recorded and said; another takes its place.
    """
    records = StudyRecords(execution.out)
    held = {index: records.run(run.name, run.seed, run.rate).info() for index, run in enumerate(runs)}
    infos = {index: info for index, info in held.items() if info.get("status") == "finished"}
    waiting = deque(index for index in range(len(runs)) if index not in infos)
    running: dict[Future, tuple[int, _Worker]] = {}
    with contextlib.ExitStack() as pools:
        free = [_Worker(replace(execution, device=device), pools) for device in devices[: len(waiting)]]
        try:
            while waiting or running:
                while waiting and free:
                    index, worker = waiting.popleft(), free.pop()
                    running[worker.take(runs[index])] = index, worker
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index, worker = running.pop(future)
                    free.append(worker)
                    try:
                        infos[index] = future.result()
                    except BrokenProcessPool:
                        infos[index] = _killed(execution, runs[index], say)
        except Interrupted as interrupted:
            for process in multiprocessing.active_children():  # which write their checkpoints; leaving waits for them
                os.kill(process.pid or 0, interrupted.number)
            raise
    return [infos[index] for index in range(len(runs))]


class _Worker:
    """One process, started when it is needed and again when it was killed: a pool of its own, so that it is known."""

    def __init__(self, execution: Execution, pools: contextlib.ExitStack):
        self.execution = execution
        self.pools = pools
        self.pool: ProcessPoolExecutor | None = None

    def take(self, run: RunSpec) -> Future:
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self.pool.submit(_work, run)
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, _begin_worker, (self.execution,))
        self.pools.callback(self.pool.shutdown, cancel_futures=True)
        return self.pool.submit(_work, run)


def _killed(execution: Execution, run: RunSpec, say: Callable[[str], None]) -> dict[str, Any]:
    records = StudyRecords(execution.out).run(run.name, run.seed, run.rate)
    info = {**begun(records, run, torch.device(execution.device)), **records.info()}
    if info["status"] == "finished":  # it ended between its last word and the answer
        return info
    info |= {
        "status": "failed",
        "message": "its process was killed, perhaps for want of memory; make room or mend what ended it and run "
        "again: it goes on from its last checkpoint.",
    }
    info.pop("traceback", None)  # of an earlier failure
    records.write_info(info)
    say(f"{run.label} failed: {info['message']}")
    return info


_worker: dict[str, Any] = {}


def _begin_worker(execution: Execution) -> None:
    end_with_parent()
    install(deferring=True)  # between runs the parent ends this process
    for plugin in execution.plugins:
        load_plugin(plugin)
    _worker["execution"] = execution
    _worker["data"] = data_of(execution.study, execution.out)


def _work(run: RunSpec) -> dict[str, Any]:
    try:
        with deferred():
            info = _attempt(_worker["execution"], run, _worker["data"], Processes(), _print)
    except Interrupted as interrupted:
        _print(str(interrupted))
        raise
    torch.cuda.empty_cache()  # what this process keeps is missing to those that share the GPU
    return info


def _print(line: str) -> None:
    print(line, flush=True)


def _attempt(
    execution: Execution, run: RunSpec, data: PreparedData, group: Processes, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train one run unless it is finished; a failure is recorded and said, not raised.

    Except what fails in one of several processes alone: the others wait for it in the middle of a step, so it is raised
    and `torchrun` ends them all.
    """
    records = StudyRecords(execution.out).run(run.name, run.seed, run.rate)
    info = records.info()
    if info.get("status") == "finished":
        return info
    IMPLEMENTATIONS.clear()
    info = begun(records, run, torch.device(execution.device))
    group.lead(lambda: records.write_info(info))
    alone: Exception | None = None
    try:
        info["parameters"] = _train(execution, run, data, group, records, say)
        info["status"] = "finished"
    except Exception as error:  # a bug in one mixer must not cost the other runs; the trace is kept with the run
        info |= {"status": "failed", "message": sentence(error) + _plugin_line(error)}
        info["diverged"] = isinstance(error, TrainingError) and not isinstance(error, SharedError)
        if not isinstance(error.__cause__ if isinstance(error, SharedError) else error, BasecapError | None):
            info["traceback"] = traceback.format_exc()
        alone = None if group.world == 1 or isinstance(error, TrainingError) else error
    info["ops"] = dict(sorted(IMPLEMENTATIONS.items()))
    if alone is not None:
        _leave(records, run, group, info, say)
        raise alone
    if group.leads:
        records.write_info(info)
        if info["status"] == "failed":
            _report_failure(f"{run.label} failed", info["message"], info.get("traceback"), say)
    return info


def _plugin_line(error: Exception) -> str:
    """Return " (FILE:LINE)" of the last line of a plugin that an error came through, else nothing."""
    files = [getattr(module, "__file__", None) for name, module in [*sys.modules.items()] if name.startswith(PLUGIN)]
    cause = error.__cause__ if isinstance(error, SharedError) and error.__cause__ else error
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _leave(
    records: RunRecords, run: RunSpec, group: Processes, info: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Record and say what failed in this process, unless another was first: then this one fails for its absence."""
    if records.info().get("status") != "failed":
        records.write_info(info)
        where = f"in process {group.rank}, which ends them all (--only runs the others)"
        say(f"{run.label} failed {where}: {info['message']}")


def _train(
    execution: Execution,
    run: RunSpec,
    data: PreparedData,
    group: Processes,
    records: RunRecords,
    say: Callable[[str], None],
) -> int:
    device = torch.device(execution.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = Place.choose(device, group, run.train.precision)
    model = LanguageModel(run.model, checkpointing=run.train.checkpointing).initialise(run.seed)
    trainer = Trainer(model, run.train, run.seed, stream=data.train, records=records, place=place)
    context = Context(data=data, device=device, autocast=place.autocast)
    evaluations = plan_evaluations(execution.study)

    def evaluate(model: LanguageModel, step: int, tokens: int) -> None:
        chooses = run.sweep and step == trainer.timetable.steps
        due = [*evaluations, HeldOutLoss()] if chooses else evaluations
        _evaluate(due, model, context, records, step, tokens)

    trainer.run(run.label, evaluate, say)
    return model.parameters_count()


def _evaluate(
    evaluations: list[Evaluation],
    model: LanguageModel,
    context: Context,
    records: RunRecords,
    step: int,
    tokens: int,
) -> None:
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

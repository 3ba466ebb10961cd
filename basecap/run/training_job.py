"""A training job: one run of a study, from its last checkpoint to its end or to the record of why it failed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch

from basecap.errors import Interrupted, LostDirectory, TrainingError
from basecap.evals import Context, ReplayedPasses
from basecap.evals.domain_loss import DomainLoss
from basecap.models.language_model import LanguageModel
from basecap.ops import IMPLEMENTATIONS
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo, RunRecords
from basecap.records.evaluation_points import includes
from basecap.run import threads
from basecap.run.evaluation_job import EvaluatedModel, evaluate
from basecap.run.jobs import JobFailure, Runtime, describe_failure, report_failure
from basecap.run.leak_test import FinalLeakTest
from basecap.run.provenance import starting_info
from basecap.run.sweep import held_out_loss
from basecap.system.files import safe_name
from basecap.system.locks import first_alone
from basecap.testing.subject import undisturbed
from basecap.train.deterministic import deterministic
from basecap.train.distributed import SharedError
from basecap.train.interruption import requested
from basecap.train.loop import Trainer
from basecap.train.placement import DevicePlacement, start_compilers
from basecap.train.profile import StepProfile
from basecap.train.wall_time import WallTime

#: The metric that train.stop_at is about.
VALIDATION = "validation_accuracy"


def train_run(run: RunSpec, runtime: Runtime) -> RunInfo | None:
    """Train one run unless it is finished, and return its info; a failure is recorded and logged, not raised.

    Returns None where processes outside the runtime's group train it now. An error in only one of several processes is
    raised: the others wait for it in the middle of a step, and `torchrun` ends all processes.
    """
    records, group = runtime.run_records(run), runtime.group
    with ExitStack() as held:
        if not group.run_on_leader(lambda: held.enter_context(runtime.records.claimed(records))):
            return None
        found = group.run_on_leader(lambda: finished_info(run, runtime))
        with threads.recorded(run, runtime.records, runtime.device), deterministic(run.train, runtime.device):
            return found or _train_claimed(run, runtime)


def finished_info(run: RunSpec, runtime: Runtime) -> RunInfo | None:
    """Return the info of a finished run, None otherwise; another command may have chosen its rate and moved it."""
    info = runtime.run_records(run).info()
    if info is None and run.sweep:
        moved = runtime.records.run(run.name, run.seed).info()
        info = moved if moved is not None and moved.lr == run.rate else None
    return info if info is not None and info.finished else None


def _train_claimed(run: RunSpec, runtime: Runtime) -> RunInfo:
    records, group = runtime.run_records(run), runtime.group
    IMPLEMENTATIONS.clear()
    size = runtime.workloads[run.task].pass_tokens
    passes = None if size is None else run.passes(size)
    proof = runtime.records.environment().get("proofs", {}).get(run.architecture, {})
    started = replace(starting_info(records, run, runtime.device, group.world), passes=passes, proof=proof)
    wall = WallTime()
    group.run_on_leader(lambda: records.write_info(started))
    alone: Exception | None = None
    try:
        info = _train(run, runtime, started, wall)
    except Interrupted:
        if group.is_leader:
            records.write_info(replace(started, seconds=wall.seconds(started.seconds)))
        raise
    except LostDirectory:  # nothing more can be recorded in it
        raise
    except Exception as error:  # a bug in one mixer must not cost the other runs; the trace is kept with the run
        failure = describe_failure(error, runtime.device)
        diverged = isinstance(error, TrainingError) and not isinstance(error, SharedError)
        info = replace(started.failed(failure.message, failure.traceback), diverged=diverged)
        alone = None if group.world == 1 or isinstance(error, TrainingError) else error
    ops, seconds = dict(sorted(IMPLEMENTATIONS.items())), wall.seconds(started.seconds)
    info = replace(info, ops=ops, seconds=seconds)
    if alone is not None:
        _record_own_failure(records, run, info, runtime)
        raise alone
    if group.is_leader:
        records.write_info(info)
        if info.status == "failed":
            failure = JobFailure(message=info.message, traceback=info.traceback)
            report_failure(f"{run.label} failed", failure, runtime.log)
    return info


def _record_own_failure(records: RunRecords, run: RunSpec, info: RunInfo, runtime: Runtime) -> None:
    """Record and log what failed in this process, unless another one failed first and caused this failure."""
    held = records.info()
    if held is None or held.status != "failed":
        records.write_info(info)
        where = f"in process {runtime.group.rank}, which ends all processes (--only runs the other architectures)"
        runtime.log(f"{run.label} failed {where}: {info.message}")


def _train(run: RunSpec, runtime: Runtime, started: RunInfo, wall: WallTime) -> RunInfo:
    """Train a run to its end, evaluating as it goes; return its info with what its model costs."""
    records = runtime.run_records(run)
    with wall.part("start"):
        profile = _profile(run, runtime, records)
        trainer = _trainer(run, runtime, wall, profile)
    context = _context(trainer, run, runtime)
    points = run.timetable.tokens

    def evaluate_point(model: LanguageModel, step: int, tokens: int) -> bool:
        evaluated = EvaluatedModel(
            model=model, step=step, tokens=tokens, context=context, records=trainer.records, group=runtime.group
        )
        decayed = trainer.timetable is not trainer.trunk  # a branch, whose end is the end of a run of that budget
        last = decayed or tokens == points[-1]
        if not decayed:
            leak_test.prepare(tokens)
        due = [
            found
            for found in runtime.evaluations
            if includes(found.config.at, tokens, points) or (decayed and found.config.at == "end")
        ]
        for evaluation in due:
            evaluate(evaluation, evaluated)
        ended = not last and runtime.group.run_on_leader(lambda: _good_enough(run, records, step))
        rest = [found for found in runtime.evaluations if ended and found.config.at == "end"]
        if run.sweep and (last or ended):
            rest.append(held_out_loss(run.task))
        for evaluation in rest:
            evaluate(evaluation, evaluated)
        return ended

    with FinalLeakTest(run, runtime, wall) as leak_test:
        try:
            stopped = trainer.run(run.label, evaluate_point, runtime.log, _compiling(trainer, run, runtime, context))
        finally:
            if profile is not None:
                profile.close()
        if stopped is not None:
            reason = f"validation accuracy has reached {run.train.stop_at:g} (train.stop_at)"
            runtime.log(f"{run.label}: ended after step {stopped} of {run.timetable.steps}, as {reason}.")
        model = trainer.layout.whole()
        with trainer.following(run.label, stopped or run.timetable.steps), wall.part("evaluations"):
            leaks = leak_test.record(model, context, trainer.records)
    parameters, state = model.parameters_count(), model.state_bytes(run.length)
    ended = replace(started, status="finished", parameters=parameters, state_bytes=state, stopped=stopped)
    return replace(ended, leak_test=leaks, cuda_graphs=trainer.graphs.record if trainer.graphs else None)


def _trainer(run: RunSpec, runtime: Runtime, wall: WallTime, profile: StepProfile | None) -> Trainer:
    """Build the model of a run on its device, and what trains it."""
    device = runtime.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_compilers(device, run.train)
    return Trainer(
        LanguageModel(run.model, checkpointing=run.train.checkpointing).initialise(run.seed),
        run.train,
        run.seed,
        workload=runtime.workloads[run.task],
        records=runtime.run_records(run),
        placement=DevicePlacement.choose(device, runtime.group, run.train.precision),
        wall=wall,
        traced=profile.step if profile else nullcontext,
    )


def _context(trainer: Trainer, run: RunSpec, runtime: Runtime) -> Context:
    """Return what the evaluations of a run are given; their passes are CUDA graphs where its steps may be."""
    replays = None
    if trainer.graphs is not None and trainer.model.compiled:
        replays = ReplayedPasses(trainer.model, lambda words: runtime.log(f"{run.label}: {words}"))
    return Context(
        data=trainer.workload,
        device=runtime.device,
        autocast=trainer.placement.autocast,
        note=trainer.note,
        replays=replays,
    )


def _profile(run: RunSpec, runtime: Runtime, records: RunRecords) -> StepProfile | None:
    """Return what traces the steps of a run that were asked for, in the first process."""
    if runtime.profile is None or not runtime.group.is_leader:
        return None
    directory = records.path / "profile"
    return StepProfile(runtime.profile, directory, runtime.device, lambda words: runtime.log(f"{run.label}: {words}"))


@contextmanager
def _compiling(trainer: Trainer, run: RunSpec, runtime: Runtime, context: Context) -> Iterator[None]:
    """Enter for a first step: what evaluations run is compiled after it.

    The first process compiles an architecture, the others find that cached.
    """
    name = safe_name(f"{run.architecture} {runtime.device}")  # code is compiled for one device
    alone = runtime.compiled and first_alone(runtime.compiled, name, lambda: requested() is not None)
    with alone or nullcontext():
        yield
        if trainer.model.compiled:
            model = trainer.layout.whole().eval()
            with torch.no_grad(), undisturbed(runtime.device):
                for evaluation in (found for found in runtime.evaluations if isinstance(found, DomainLoss)):
                    evaluation.trial(model, replace(context, replays=None))
            trainer.model.train()


def _good_enough(run: RunSpec, records: RunRecords, step: int) -> bool:
    """Whether the mean validation accuracy over the cells of a run's task ends it at this evaluation point."""
    if run.train.stop_at is None:
        return False
    found = [record.value for record in records.evals() if (record.step, record.metric) == (step, VALIDATION)]
    return bool(found) and sum(found) / len(found) >= run.train.stop_at

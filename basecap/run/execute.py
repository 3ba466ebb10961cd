"""Run a study: set it up, try every architecture, choose learning rates, train the unfinished runs."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from basecap.plan.checks import check
from basecap.plan.evaluation_work import heavy_work
from basecap.plan.needs import little_disk
from basecap.plan.prospects import cut_patterns, short_runs
from basecap.plan.runs import RunSpec, moved_points
from basecap.plugins import load_plugin
from basecap.records import RunInfo
from basecap.run import threads
from basecap.run.executors import EXECUTORS, Resources, device_here, devices_for
from basecap.run.jobs import Execution, Runtime
from basecap.run.start import start_study
from basecap.run.stored_weights import evaluate_stored
from basecap.run.sweep import choose_rates, train_rates
from basecap.run.trackers import Follower
from basecap.run.trial import try_new
from basecap.run.watching import UNWATCHED, Watching
from basecap.study.config import StudyConfig
from basecap.train.deterministic import prepare
from basecap.train.distributed import processes
from basecap.train.interruption import listening


def execute(
    study: StudyConfig,
    out: Path,
    *,
    only: set[str],
    on: Resources,
    plugins: Sequence[Path],
    log: Callable[[str], None],
    allow_unproved: bool = False,
    watching: Watching = UNWATCHED,
) -> list[RunInfo]:
    """Train every selected run of `study` into `out`, resuming unfinished ones; return each run's info.

    Evaluations of the study that finished runs lack are run on their stored weights.

    In a sweep of learning rates, these are the runs with the chosen rates and the failed runs that prevented a choice.

    Under `torchrun` all processes train each run together and only the leader returns infos. Otherwise runs are trained
    one after the other on one device, or side by side if there are several GPUs or `on.per_device` is not 1; with
    "auto" a trial step of each architecture decides how many share a GPU. All architectures are tried before the first
    of them trains; one that is not proved to see no future fails there, unless `allow_unproved` lets it train.

    Raises:
        ConfigError: invalid names, sizes or options, a plugin's architecture that is not causal, or a directory that
            holds another study. Nothing is written.
        DataError: text that cannot be prepared, or results of runs whose records are missing.
        Interrupted: SIGINT, SIGTERM or SIGHUP was received; runs in training have written a checkpoint.
        TrainingError: one of the first two in the leader of several processes, raised in all of them.
        Exception: a failure in a single one of several processes, after it was recorded.
    """
    loaded = {path: load_plugin(path) for path in plugins}
    chosen = device_here(on)
    with listening(), processes(chosen) as group, contextlib.ExitStack() as held:
        checked = check(study, group.world)
        watching.refuse_beyond(checked.runs)
        devices = devices_for(chosen, on, group.world)
        threads.refuse(on.threads, chosen)
        prepare(chosen, [run.train for run in checked.runs])
        executor_of = EXECUTORS.get(on.executor)
        execution = Execution(study=study, out=out, device=str(chosen), plugins=loaded, on=on, profile=watching.profile)
        started = start_study(execution, checked, only, group, log, held)
        plan, runtime = started.plan, started.runtime
        group.run_on_leader(lambda: _set_threads(plan.runs, on, runtime))
        held.enter_context(Follower(runtime.records, watching.trackers if group.is_leader else {}, study.title, log))
        with executor_of(started.execution, runtime, devices if len(plan.runs) > 1 else devices[:1]) as executor:
            failed = group.run_on_leader(lambda: try_new(plan.runs, runtime, executor.attempt, allow_unproved))
            group.run_on_leader(lambda: _log_plan(plan.runs, runtime))
            unsound = {info.name for info in failed}
            swept = [run for run in plan.swept if run.name not in unsound]
            tried, infos = train_rates(swept, executor.train)
            if study.train.sweep:
                group.run_on_all(lambda: None)  # every process has read what is about to move
                group.run_on_leader(lambda: choose_rates(runtime.records, tried, log))
                plan = started.after_sweep()
            unchosen = {run.name for run in plan.swept}
            failed += [info for info in infos if info.status == "failed" and info.name in unchosen]
            infos = failed + executor.train([run for run in plan.trained if run.name not in unsound])
            evaluate_stored(plan.trained, runtime, executor)
        return infos if group.is_leader else []


def _set_threads(runs: Sequence[RunSpec], on: Resources, runtime: Runtime) -> None:
    """Record the threads of the CPU that this command asks for, if it does."""
    if on.threads is not None:
        threads.record(dict.fromkeys((run.architecture for run in runs), on.threads), runtime.records)


def _log_plan(runs: Sequence[RunSpec], runtime: Runtime) -> None:
    """Log if disk, depth or steps are too few, which evaluations take another point, what takes more than training."""
    unfinished = [run for run in runs if not runtime.run_records(run).finished]
    for sentence in (*little_disk(runs, runtime.records.path), *cut_patterns(runs), *short_runs(unfinished)):
        runtime.log(sentence)
    if runtime.profile is not None and not unfinished:
        runtime.log("--profile traces no step, as all runs are finished.")
    for found in runtime.evaluations:
        for sentence in moved_points(unfinished, found.config.at, f"evals: {found.declaration.name}: at"):
            runtime.log(sentence)
    for sentence in heavy_work(unfinished, runtime.evaluations, runtime.workloads):
        runtime.log(sentence)

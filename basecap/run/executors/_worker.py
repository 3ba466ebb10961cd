"""The jobs of a process that another one started: `begin` is called once, then any number of jobs."""

from basecap.errors import Interrupted, LostDirectory
from basecap.plan.runs import RunSpec, plan_evaluations
from basecap.plan.workloads import material_of
from basecap.plugins import load_plugin
from basecap.records import RunInfo, StudyRecords
from basecap.run import sharing
from basecap.run.evaluation_job import StoredPoint, evaluate_point
from basecap.run.jobs import Execution, JobFailure, Runtime, Trial, free_memory
from basecap.run.sharing import Footprint
from basecap.run.training_job import train_run
from basecap.run.trial import try_run
from basecap.system import environment, mps
from basecap.system.progress import share_terminal, write_line
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, expendable, install

#: What the jobs of this process use.
_runtime: list[Runtime] = []


def begin(execution: Execution) -> None:
    """Prepare this process for jobs: its device, plugins, data and evaluations."""
    share_terminal()
    if execution.service is not None:
        mps.join(execution.service)
    device = environment.choose_device(execution.device)
    compiles = device.type == "cuda" or execution.study.train.compile
    environment.limit_processors(execution.threads, execution.compilers if compiles else None)
    install(deferring=True)  # between jobs the parent ends this process
    for plugin, digest in execution.plugins.items():
        load_plugin(plugin, digest)
    records = StudyRecords(execution.out)
    records.watch()
    _runtime[:] = [
        Runtime(
            records=records,
            device=device,
            workloads=material_of(execution.study, execution.out).workloads(),
            evaluations=plan_evaluations(execution.study),
            group=Processes(),
            log=write_line,
            compiled=execution.compiled,
            profile=execution.profile,
        )
    ]


def attempt(run: RunSpec) -> Trial:
    """Try a run; return what was found."""
    with deferred(), expendable():  # there is no checkpoint to write
        return try_run(run, _runtime[0])


def measure(run: RunSpec) -> Footprint:
    """Return what a training step of a run takes of this process's GPU."""
    with deferred(), expendable():  # there is nothing to write
        return sharing.measure(run, _runtime[0].device)


def train(run: RunSpec) -> RunInfo | None:
    """Train a run and return its info, None where another command trains it.

    Raises Interrupted when a signal came, LostDirectory when the study's directory was moved, after a checkpoint.
    """
    try:
        with deferred():
            info = train_run(run, _runtime[0])
    except (Interrupted, LostDirectory) as stopped:
        write_line(str(stopped))
        raise
    free_memory(_runtime[0].device)
    return info


def evaluate(point: StoredPoint) -> dict[str, JobFailure]:
    """Evaluate the stored weights of a point; return the evaluations that failed."""
    with deferred(), expendable():  # what is recorded stays
        failures = evaluate_point(point, _runtime[0])
    free_memory(_runtime[0].device)
    return failures

"""Executor `ray`: jobs run as tasks of a Ray cluster, each with processors and a share of a GPU."""

import contextlib
import logging
import os
import pickle
import signal
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from basecap.data import find_prepared
from basecap.errors import ConfigError, Interrupted, describe_error
from basecap.plan.runs import RunSpec
from basecap.plan.workloads import cache_of
from basecap.records import RunInfo, RunRecords
from basecap.run.crowding import failures, starts_again, trial_of
from basecap.run.evaluation_job import StoredPoint
from basecap.run.executors import _ray_tasks
from basecap.run.executors._contract import Executor, executor
from basecap.run.executors._packages import pack, put
from basecap.run.executors._ray_options import RayOptions
from basecap.run.executors._ray_tasks import Answer, Errand
from basecap.run.executors.local import record_killed
from basecap.run.jobs import Execution, JobFailure, Runtime, Trial
from basecap.run.shared_work import train_shared
from basecap.run.training_job import finished_info
from basecap.train.interruption import SIGNALS, deferred

#: Seconds between two looks at whether a signal came while tasks run.
POLL = 0.5
#: Seconds until an address that does not answer is refused.
PATIENCE = 5.0
#: Why a job failed whose task was lost.
LOST = "its process was killed, possibly out of memory, or its node was lost, each time that it was tried"
#: Files of a study that its runs read.
READ = ("study.yaml", "environment.json", "declarations.json", "lock", "data")


def _prepare_text(execution: Execution, log: Callable[[str], None]) -> None:
    """Have tasks prepare the text of a study together, if the options ask for it and that is not done.

    Raises ConfigError, DataError where they cannot, or all of them were lost.
    """
    options, section = RayOptions.of(execution.on), execution.study.data
    if section is None or not options.prepare:
        return
    cache = cache_of(section, execution.out).absolute()
    if find_prepared(section, cache) is not None:
        return
    cache.mkdir(parents=True, exist_ok=True)
    plugins = {path.absolute(): digest for path, digest in execution.plugins.items()}
    given = pickle.dumps(_ray_tasks.TextErrand(section=section, cache=cache, plugins=plugins, directory=Path.cwd()))
    with _joined(options.address) as (ray, _):
        resources = {"num_cpus": options.cpus, "max_retries": options.retries, "scheduling_strategy": "SPREAD"}
        task = ray.remote(_ray_tasks.prepare_text).options(**resources)
        tasks = [task.remote(given) for _ in range(options.prepare)]
        log(f"{options.prepare} tasks of Ray prepare the text.")
        try:
            while tasks:
                for ended in ray.wait(tasks, timeout=POLL)[0]:
                    tasks.remove(ended)
                    with contextlib.suppress(ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
                        ray.get(ended)  # a task ends when the whole text is prepared
                        return
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for left in tasks:
                ray.cancel(left)
    raise ConfigError(f"tasks of Ray could not prepare the text: {LOST}.")


@executor("ray", remote=True, prepare=_prepare_text)
class RayExecutor(Executor):
    """Does jobs as tasks of a Ray cluster. A task whose node is lost runs again on another one.

    One that lacks memory beside others starts again with a GPU, or a node, of its own.

    A context that is left because of a signal cancels the tasks and waits for their checkpoints.
    """

    def __init__(self, execution: Execution, runtime: Runtime, devices: Sequence[str]):
        """Read the options; raises ConfigError. Ray is imported, and the cluster joined, with the first job."""
        self.options = RayOptions.of(execution.on)
        self.execution = execution
        self.runtime = runtime
        self.key = uuid.uuid4().hex
        self._held = contextlib.ExitStack()
        self._running: dict[Any, Errand] = {}
        #: Locks of the runs whose records come back, until they are here; no node sees them.
        self._claims: dict[str, contextlib.ExitStack] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what runs, wait for it, and leave the cluster."""
        with self._held:
            for task in self._running:
                self.ray.cancel(task)
            for task, errand in [*self._running.items()]:
                with contextlib.suppress(Exception):  # there is an error already
                    self._answer(task, errand)

    @cached_property
    def _joined(self) -> tuple[Any, bool]:
        return self._held.enter_context(_joined(self.options.address))

    @property
    def ray(self) -> Any:
        """The module, after it has joined the cluster."""
        return self._joined[0]

    @cached_property
    def gpus(self) -> float:
        """GPUs of a task."""
        on, options = self.execution.on, self.options
        per_device = cast(int, on.per_device)
        has = self.ray.cluster_resources().get("GPU", 0) > 0
        found = options.gpus if options.gpus is not None else (1 / per_device if has and on.device != "cpu" else 0.0)
        if on.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"Ray chooses the GPU of each task; leave out --device {on.device}.")
        if not found and (on.device == "cuda" or per_device > 1):
            what = "--device cuda" if on.device == "cuda" else "--per-device"
            raise ConfigError(f"{what} is for GPUs, and the tasks take no GPU; set --ray gpus=N, or leave it out.")
        return found

    @cached_property
    def _shared(self) -> Execution:
        """What all tasks share."""
        device = self.execution.on.device or ("cuda" if self.gpus else "cpu")
        processors = max(1, int(self.options.cpus))
        return replace(
            self.execution,
            out=self.execution.out.absolute(),
            device=device,
            plugins={path.absolute(): digest for path, digest in self.execution.plugins.items()},
            threads=1 if device == "cuda" else processors,
            compilers=processors,
        )

    def attempt(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Trial]]:
        """Try runs, see `basecap.run.trial`."""
        names = [trial_of(run) for run in runs]
        for number, answer in self._run(_ray_tasks.attempt, runs, [""] * len(runs), names):
            yield runs[number], Trial(failure=JobFailure(message=f"{LOST}.")) if answer is None else answer.result

    def train(self, runs: Sequence[RunSpec]) -> list[RunInfo]:
        """Return each run's info; raises Interrupted when a signal came, after each task wrote a checkpoint."""
        return train_shared(runs, self._train, self.runtime)

    def _train(self, runs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, RunInfo | None]]:
        held = [(run, finished_info(run, self.runtime)) for run in runs]
        yield from ((run, info) for run, info in held if info is not None)
        waiting = [run for run, info in held if info is None]
        directories, names = [self._below(run) for run in waiting], [run.label for run in waiting]
        for number, answer in self._run(_ray_tasks.train, waiting, directories, names):
            run = waiting[number]
            yield run, record_killed(run, self.runtime, LOST) if answer is None else answer.result

    def evaluate(
        self, points: Sequence[StoredPoint], show: Callable[[str], None]
    ) -> Iterator[tuple[StoredPoint, Mapping[str, JobFailure]]]:
        """Evaluate stored weights; yield each point with the evaluations that failed.

        The points of a run are one task, as no two machines may append to the same file.
        """
        of_run: dict[str, list[StoredPoint]] = {}
        for point in points:
            of_run.setdefault(self._below(point.run), []).append(point)
        groups, out = [*of_run.values()], self.runtime.records.path
        sent = [
            [replace(point, weights=point.weights and point.weights.relative_to(out)) for point in group]
            for group in groups
        ]
        names = [f"{group[0].run.label}: its evaluation" for group in groups]
        for number, answer in self._run(_ray_tasks.evaluate, sent, [*of_run], names):
            lost = [dict.fromkeys(point.evaluations, JobFailure(message=f"{LOST}.")) for point in groups[number]]
            yield from zip(groups[number], lost if answer is None else answer.result, strict=True)

    def _below(self, run: RunSpec) -> str:
        """Return the directory of a run below that of the study."""
        return str(self.runtime.run_records(run).path.relative_to(self.runtime.records.path))

    def _run(
        self, job: Callable[..., Any], items: Sequence[Any], runs: Sequence[str], names: Sequence[str]
    ) -> Iterator[tuple[int, Answer | None]]:
        """Yield the number of each item with the answer of its task, None for a lost one, as they end.

        Where records come back, a run that another command works on is not trained: its answer is empty. A task that
        lacks memory beside others is started again with what it shared with them.

        Args:
            job: a function of `_ray_tasks`.
            items: what it is called with.
            runs: directory of the run that each writes to, "" where it writes to none.
            names: what messages call each.
        """
        if not items:
            return
        ray, out, returned = self.ray, self.runtime.records.path, self.options.records == "returned"
        asked = {"num_cpus": self.options.cpus, "num_gpus": self.gpus}
        self._note_waiting(asked)
        whole, words = self._whole(asked)
        task, study = ray.remote(_ray_tasks.perform), ray.put(pack(out, READ)) if returned else None
        numbers: dict[Any, int] = {}

        def start(number: int, resources: Mapping[str, float]) -> bool:
            run = runs[number]
            if returned and run and not self._claim(run, wait=job is _ray_tasks.evaluate):
                return False
            errand = Errand(
                key=self.key, execution=self._shared, directory=Path.cwd(), job=job, item=items[number], run=run
            )
            files = pack(out / run, os.listdir(out / run)) if returned and run and (out / run).exists() else None
            started = task.options(max_retries=self.options.retries, **resources).remote(
                pickle.dumps(errand), study, files
            )
            self._running[started], numbers[started] = errand, number
            return True

        for number in range(len(items)):
            if not start(number, asked):
                yield number, Answer()
        beside = {*numbers.values()} if whole != asked else set()
        while self._running:
            with deferred():  # no answer is lost to a signal
                ended = ray.wait([*self._running], timeout=POLL)[0]
                answers = [(numbers[task], self._answer(task, self._running[task])) for task in ended]
            if any(answer is not None and answer.stopped for _, answer in answers):
                raise Interrupted(signal.SIGINT)  # cancelled by someone else
            for number, answer in answers:
                messages = [LOST] if answer is None else failures(answer.result)
                if number not in beside or not starts_again(names[number], messages, words, self.runtime.log):
                    yield number, answer
                    continue
                beside.remove(number)
                if not start(number, whole):
                    yield number, Answer()

    def _whole(self, asked: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Return the resources of a task that shares nothing that others fill, and how messages say so.

        That is a GPU, or where tasks take none the CPUs of the largest node.
        """
        if asked["num_gpus"] > 0:
            return {**asked, "num_gpus": max(1.0, asked["num_gpus"])}, "with a GPU of its own"
        most = max([node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"]], default=0)
        return {**asked, "num_cpus": max(most, asked["num_cpus"])}, "with a node of its own"

    def _claim(self, below: str, *, wait: bool) -> bool:
        """Lock a run until its task has ended; return False where another command works on it."""
        records = self.runtime.records
        with contextlib.ExitStack() as held:
            mine = held.enter_context(records.claimed(RunRecords(records.path / below), wait))
            if mine:
                self._claims[below] = self._held.enter_context(held.pop_all())
        return mine

    def _answer(self, task: Any, errand: Errand) -> Answer | None:
        """Return the answer of a task, waiting for it, and write the files that came back; None for a lost one."""
        errors = self.ray.exceptions
        with self._claims.pop(errand.run, contextlib.ExitStack()):
            try:
                answer: Answer = pickle.loads(self.ray.get(task))
            except errors.RayTaskError as error:
                raise error.cause from None
            except errors.TaskCancelledError:  # before it began
                return Answer(stopped=True)
            except errors.RayError:
                return None
            finally:
                del self._running[task]
            if answer.package is not None:
                out = self.runtime.records.path
                records = RunRecords(out / errand.run, self.runtime.records.place)
                records.refuse_left()
                put(answer.package, records.path, out, all_of_it=errand.job is _ray_tasks.train)
            return answer

    def _note_waiting(self, resources: Mapping[str, float]) -> None:
        """Log where no node has room for a task: a cluster may start one, else the tasks wait for ever.

        Raises ConfigError where Ray runs on this machine alone.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        cpus, gpus = resources["num_cpus"], resources["num_gpus"]
        if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            return
        if self._joined[1]:
            raise ConfigError(
                f"this machine does not have the {cpus:g} CPUs and {gpus:g} GPUs of a task; lower them with --ray "
                "cpus=N, gpus=N, or give the address of a cluster."
            )
        self.runtime.log(
            f"No node of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs: tasks wait for one. Lower them with "
            "--ray cpus=N, gpus=N, or press Ctrl-C."
        )


@contextlib.contextmanager
def _joined(address: str | None) -> Iterator[tuple[Any, bool]]:
    """Yield the module `ray` within a cluster, and whether it was started here, alone; it is left, or ends, at the end.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("executor ray needs Ray; pip install 'basecap[ray]'.") from error
    if ray.is_initialized():
        yield ray, False
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if address is not None and ":" in address:  # Ray itself would try for half a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), PATIENCE).close()
        joined: Any = ray.init(address=address, logging_level=logging.WARNING, include_dashboard=False)
        # Ray names the directory of a session after the process that started it.
        alone = joined.address_info["session_dir"].endswith(f"_{os.getpid()}")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise ConfigError(
            f"no Ray cluster answers at {address or 'RAY_ADDRESS'} ({describe_error(error)}); start Ray here "
            "with `ray start`, or leave out address."
        ) from error
    finally:
        for number, handler in handlers.items():  # Ray replaces that of SIGTERM
            signal.signal(number, handler)
    try:
        yield ray, alone
    finally:
        ray.shutdown()

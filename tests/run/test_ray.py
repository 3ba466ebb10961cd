"""Executor ray on a cluster of two nodes on this machine: a lost node, Ctrl-C, records that come back."""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from basecap.data import find_prepared
from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError, Interrupted
from basecap.plan.runs import RunSpec, plan_runs
from basecap.records import RunRecords, StudyRecords
from basecap.run.crowding import failures
from basecap.run.evaluation_job import StoredPoint
from basecap.run.execute import execute
from basecap.run.executors import Resources, prepare_by_jobs
from basecap.run.executors import ray as executor_of_ray
from basecap.run.executors._packages import pack, put
from basecap.run.executors._ray_options import RayOptions
from basecap.run.executors._ray_tasks import Answer
from basecap.run.executors.ray import RayExecutor, _joined
from basecap.run.jobs import Execution, JobFailure, Trial
from basecap.run.stored_weights import evaluate_directory
from basecap.study.config import load_study, select
from tests import conftest
from tests.records.made_up import run_info
from tests.run._execute import results
from tests.run.test_executors import runtime_of
from tests.small_study import small_study

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")

HERE = Resources(device="cpu")
#: Runs that take long enough to be lost in the middle.
LONG = {"tokens": 20_480, "eval_every": 10_240, "checkpoint_every": 2560}


def run(file: Path, out: Path, on: Resources, heard: Callable[[str], None] = lambda line: None) -> list[str]:
    config, said = load_study(str(file)), []

    def log(line: str) -> None:
        said.append(line)
        heard(line)

    infos = execute(config, out, only=select(config, []), on=on, plugins=(), log=log)
    assert [info.status for info in infos] == ["finished"] * 2
    return said


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    study = small_study(path / "text")
    study["train"] |= LONG
    (path / "tiny.yaml").write_text(yaml.safe_dump(study))
    return path / "tiny.yaml"


@pytest.fixture(scope="module")
def local(file) -> dict[str, Any]:
    out = file.parent / "local"
    run(file, out, HERE)
    return results(out)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 5, "health_check_initial_delay_ms": 0}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        found.add_node(num_cpus=1, num_gpus=1)
    with pytest.MonkeyPatch.context() as patched:  # Ray takes this machine's own address, not that of the loopback
        patched.setattr(conftest, "LOCAL", (*conftest.LOCAL, found.address.rpartition(":")[0]))
        yield found
    found.shutdown()


@pytest.fixture
def joined(cluster) -> Iterator[None]:
    """The commands of a test join the cluster together, so that a later one finds processes that imported PyTorch."""
    with _joined(cluster.address):
        yield


def entropies_of(out: Path, on: Resources) -> list[float]:
    """Evaluate a finished run, and return what was found."""
    given = {"add": ["influence-entropy: {length: 32, split: test}"], "only": ["window 4"], "plugins": ()}
    assert evaluate_directory(out, **given, at=None, on=on, log=print) == 0
    return [found.value for found in StudyRecords(out).run("window 4", 0).evals() if found.eval == "influence-entropy"]


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_training(out: Path) -> list[str]:
    """Return the directories of the runs that have trained past their first checkpoint and are not finished."""
    found = [run for run in StudyRecords(out).runs() if not run.finished]
    return [run.path.name for run in found if len(run.metrics()) > 12]


def test_a_lost_node_costs_nothing_and_the_numbers_are_those_of_a_local_run(file, local, cluster):
    """Each node has a GPU by name, of which a task takes half, and one processor: two runs train at a time."""
    out, lost = file.parent / "ray", []

    def lose_a_node() -> None:
        wait_until(lambda: len(in_training(out)) == 2)
        lost.extend(in_training(out))
        node = cluster.list_all_nodes()[-1]
        workers = children(node.all_processes["raylet"][0].process.pid)
        cluster.remove_node(node, allow_graceful=False)
        signal_all(workers, signal.SIGKILL)  # they would notice within a second

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    settings = {"address": cluster.address, "gpus": "0.5"}
    run(file, out, Resources(device="cpu", executor="ray", settings=settings))
    thread.join()
    assert len(lost) == 2 and len(cluster.list_all_nodes()) == 2
    assert results(out) == local


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def signal_all(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


def prepared_by_tasks(file: Path, out: Path, address: str) -> list[str]:
    """Have tasks prepare the text of a study, twice; return what was logged."""
    study, said = load_study(str(file)), []
    on = Resources(device="cpu", executor="ray", settings={"address": address, "prepare": "2"})
    for _ in range(2):
        prepare_by_jobs(Execution(study=study, out=out, device="cpu", on=on), said.append)
        assert find_prepared(study.text, out / "data") is not None
    return said


@pytest.mark.usefixtures("joined")
def test_an_interrupted_command_resumes_and_is_evaluated_with_the_records_that_came_back(file, local, cluster):
    """The tasks work in directories of their own: neither node sees that of the study, so the command locks its runs.

    The second command waits for a run that another one has locked. The text is prepared by tasks before.
    """
    out, locked = file.parent / "returned", []
    assert prepared_by_tasks(file, out, cluster.address) == ["2 tasks of Ray prepare the text."]
    study = StudyRecords(out)
    settings = {"address": cluster.address, "records": "returned"}
    on = Resources(device="cpu", executor="ray", settings=settings)

    def at_work() -> bool:
        found = Path(tempfile.gettempdir()).glob("basecap-*/runs/*/metrics.jsonl")
        return any(len(path.read_text().splitlines()) > 12 for path in found)

    def interrupt() -> None:
        """Ctrl-C; meanwhile the processes of the nodes stand still, so that no run ends before it is asked to stop."""
        wait_until(at_work)
        nodes = cluster.list_all_nodes()
        workers = [pid for node in nodes for pid in children(node.all_processes["raylet"][0].process.pid)]
        signal_all(workers, signal.SIGSTOP)
        locked.extend(name for name in ("transformer++", "window 4") if study.is_claimed(study.run(name, 0)))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
        signal_all(workers, signal.SIGCONT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="run the same command again to resume"):
        run(file, out, on)
    thread.join()
    stopped = in_training(out)
    assert stopped and all((out / "runs" / name / "resume").is_dir() for name in stopped)
    assert len(locked) == 2 and not study.busy
    other, waits = contextlib.ExitStack(), "waiting for another command that trains "
    assert other.enter_context(study.claimed(RunRecords(out / "runs" / stopped[0])))
    said = run(file, out, on, lambda line: other.close() if line.startswith(waits) else None)
    assert sum(line.startswith(waits) for line in said) == 1
    assert results(out) == local
    entropies = [entropies_of(directory, where) for directory, where in ((out, on), (file.parent / "local", HERE))]
    assert entropies[0] == entropies[1] != []


def test_a_run_whose_rate_another_command_has_chosen_is_not_trained_again(study_file, tmp_path):
    """That command has moved it out of the sweep, where no node would find it."""
    study = load_study(str(study_file), ("train.lr=[0.01,0.02]",))
    run, *_ = plan_runs(study, byte_tokenizer().vocab_size)
    moved = run_info(run.name, seed=run.seed, lr=run.rate)
    records = StudyRecords(tmp_path / "out")
    records.run(run.name, run.seed).write_info(moved)
    on = Resources(device="cpu", executor="ray", settings={"records": "returned"})
    executor = RayExecutor(
        Execution(study=study, out=records.path, device="cpu", on=on), runtime_of(records.path, print), ["cpu"]
    )
    assert run.sweep and executor.train([run]) == [moved]


@pytest.mark.parametrize(
    ("settings", "per_device", "words"),
    [
        ({"adress": "auto"}, 1, "--ray has no option 'adress': did you mean 'address'?"),
        ({"prepare": "2", "records": "returned"}, 1, "prepare is for a cache that all nodes see; leave it out with"),
        ({"prepare": "2.5"}, 1, r"--ray prepare=2\.5: give a whole number of at least 1\."),
        ({"cpus": "none"}, 1, r"--ray cpus=none: give a number of at least 0\.01\."),
        ({"address": "ray://there:1"}, 1, "give HOST:PORT of the head node, or auto"),
        ({"records": "back"}, 1, "give shared or returned"),
        ({}, "auto", "--per-device auto is for GPUs of this machine; give executor ray a number"),
    ],
)
def test_options_are_refused_in_a_sentence(settings, per_device, words):
    with pytest.raises(ConfigError, match=words):
        RayOptions.of(Resources(executor="ray", per_device=per_device, settings=settings))


def test_a_cluster_that_does_not_answer_is_named(study_file, tmp_path):
    settings = {"address": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 .*; start Ray here"):
        run(study_file, tmp_path / "out", Resources(device="cpu", executor="ray", settings=settings))


class Alone:
    """Stands for Ray on a machine of two processors."""

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}]

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 2.0}


@pytest.mark.parametrize("alone", [True, False])
def test_whether_ray_was_started_here_is_known(alone: bool, monkeypatch):
    began = SimpleNamespace(address_info={"session_dir": f"/tmp/ray/session_2026_1_{os.getpid() + (not alone)}"})
    library = SimpleNamespace(is_initialized=lambda: False, init=lambda **options: began, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", library)
    with _joined(None) as found:
        assert found == (library, alone)


def test_tasks_that_this_machine_alone_has_no_room_for_are_refused(study_file, tmp_path, monkeypatch):
    study, said = load_study(str(study_file)), []
    on = Resources(device="cpu", executor="ray", settings={"cpus": "3"})
    execution = Execution(study=study, out=tmp_path / "out", device="cpu", on=on)
    runs = plan_runs(study, byte_tokenizer().vocab_size)
    alone, one_of_many = (RayExecutor(execution, runtime_of(execution.out, said.append), ["cpu"]) for _ in range(2))
    monkeypatch.setattr(executor_of_ray, "_joined", lambda address: nullcontext((Alone, True)))
    with pytest.raises(ConfigError, match="this machine does not have the 3 CPUs and 0 GPUs of a task; lower them"):
        list(alone.attempt(runs))
    monkeypatch.setattr(executor_of_ray, "_joined", lambda address: nullcontext((Alone, False)))
    one_of_many._note_waiting({"num_cpus": 3.0, "num_gpus": 0.0})
    assert len(said) == 1 and said[0].startswith("No node of the Ray cluster has 3 CPUs and 0 GPUs: tasks wait")


class Crowded(Alone):
    """Stands for Ray where a first try of an item finds no memory, or is lost, and a second one ends."""

    exceptions = SimpleNamespace(RayTaskError=ValueError, TaskCancelledError=ValueError, RayError=MemoryError)

    def __init__(self, lacking: dict[str, Any], ended: Any):
        self.lacking, self.ended = lacking, ended
        self.tasks: list[tuple[str, float, float]] = []

    @staticmethod
    def name_of(item: Any) -> str:
        return item.name if isinstance(item, RunSpec) else item[0].run.name

    def remote(self, function: Callable[..., bytes]) -> Any:
        def options(max_retries: int, num_cpus: float, num_gpus: float) -> Any:
            def start(errand: bytes, study: object, run: object) -> int:
                self.tasks.append((self.name_of(pickle.loads(errand).item), num_cpus, num_gpus))
                return len(self.tasks) - 1

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    @staticmethod
    def wait(tasks: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return tasks[:1], tasks[1:]

    def get(self, task: int) -> bytes:
        found = self.lacking.pop(self.tasks[task][0], self.ended)
        if found is None:
            raise MemoryError
        return pickle.dumps(Answer(result=found))


FULL, OTHER = JobFailure(message="CUDA out of memory. Tried to allocate 2 GiB."), JobFailure(message="no such thing")


@pytest.mark.parametrize(
    ("job", "full", "other", "ended", "named"),
    [
        ("attempt", Trial(failure=FULL), Trial(failure=OTHER), Trial(), "window 4: its trial step"),
        (
            "train",
            run_info("window 4", status="failed", message=FULL.message),
            run_info("transformer++", status="failed", message=OTHER.message),
            run_info("window 4"),
            "window 4 (seed 0)",
        ),
        ("evaluate", [{"copying": FULL}], [{"copying": OTHER}], [{}], "window 4 (seed 0): its evaluation"),
    ],
)
@pytest.mark.parametrize("gpus", ["0.25", "0", "1"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_task_that_lacks_memory_beside_others_starts_again_alone(
    job, full, other, ended, named, gpus, lost, study_file, tmp_path, monkeypatch
):
    out, study, said = tmp_path / "out", load_study(str(study_file)), []
    on = Resources(device="cpu", executor="ray", settings={"gpus": gpus})
    execution = Execution(study=study, out=out, device="cpu", on=on)
    crowded = Crowded({"window 4": None if lost else full, "transformer++": other}, ended)
    monkeypatch.setattr(executor_of_ray, "_joined", lambda address: nullcontext((crowded, True)))
    runs = plan_runs(study, byte_tokenizer().vocab_size)[::-1]
    points = [StoredPoint(run=run, step=10, tokens=2560, weights=None, evaluations=("copying",)) for run in runs]
    with RayExecutor(execution, runtime_of(out, said.append), ["cpu"]) as executor:
        found = {
            "attempt": lambda: {run.name: failures(trial) for run, trial in executor.attempt(runs)},
            "train": lambda: {run.name: failures(info) for run, info in zip(runs, executor.train(runs), strict=True)},
            "evaluate": lambda: {point.run.name: failures(bad) for point, bad in executor.evaluate(points, print)},
        }[job]()
    asked = [(run.name, 1.0, float(gpus)) for run in runs]
    if gpus == "1":  # it shared nothing
        assert crowded.tasks == asked and len(found["window 4"]) == 1
        return
    cpus, whole, place = (1.0, 1.0, "GPU") if gpus == "0.25" else (2.0, 0.0, "node")
    why = "was killed, possibly out of memory," if lost else "found too little memory"
    assert found == {"window 4": [], "transformer++": [OTHER.message]}
    assert crowded.tasks == [*asked, ("window 4", cpus, whole)]
    assert said == [f"{named} {why} beside others; it starts again with a {place} of its own."]


def test_an_evaluation_brings_back_records_and_leaves_weights_alone(tmp_path):
    run_directory, held = tmp_path / "run", tmp_path / "held"
    for name, content in {"evals.jsonl": "two rows", "resume/step-1/state.json": "same", "old/gone": ""}.items():
        (run_directory / name).parent.mkdir(parents=True, exist_ok=True)
        (run_directory / name).write_text(content)
    put(pack(run_directory, ["evals.jsonl", "resume", "old"]), held, tmp_path, all_of_it=True)
    (run_directory / "evals.jsonl").write_text("three rows")
    put(pack(run_directory, ["evals.jsonl", "missing"]), held, tmp_path, all_of_it=False)
    assert (held / "evals.jsonl").read_text() == "three rows" and (held / "old" / "gone").exists()
    put(pack(run_directory, ["evals.jsonl", "resume"]), held, tmp_path, all_of_it=True)
    assert (held / "resume" / "step-1" / "state.json").read_text() == "same" and not (held / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "held"}

"""Executor `slurm` on a real cluster of two nodes on this machine."""

import signal
import threading
import time
from pathlib import Path

import pytest

from basecap.data import find_prepared
from basecap.errors import ConfigError
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources, _slurm_job, prepare_by_jobs
from basecap.run.executors import _slurm_commands as slurm
from basecap.run.executors import slurm as executor
from basecap.run.jobs import Execution
from basecap.study.config import load_study
from basecap.train.distributed import processes
from tests.forks import command, start
from tests.run import slurm_cluster
from tests.run._execute import results


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    cluster = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def queue(cluster, monkeypatch):
    """The commands of this process use the cluster; its queue is empty afterwards."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(executor, "LONGEST_PAUSE", 0.5)
    yield cluster
    cluster.empty()


def wait_for(found, seconds=120.0, pause=0.1):
    """Return what `found` returns once that is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(pause)
    return value


def training() -> list[slurm.QueuedTask]:
    """Return the tasks of this user that train now."""
    return [task for task in slurm.queue() or () if "-train-" in task.job and task.state == "RUNNING"]


def started(out: Path, task: slurm.QueuedTask) -> dict:
    """Return the item of a task of one run."""
    (item,) = executor.SlurmBatch(out / "slurm" / task.job).content["tasks"][task.index]
    return item


def train(study: Path, out: Path, settings=(), only="transformer++", log=print, **given):
    """Run a study by this process as its command."""
    on = Resources(device="cpu", executor="slurm", settings={"time": "5", **given})
    return execute(load_study(str(study), settings), out, only={only}, on=on, plugins=(), log=log)


def test_a_study_outlives_its_command_and_a_node(study_file, tmp_path, queue):
    """A job is told to stop, the command is killed, a node is lost: the results are those of a local study."""
    settings = ("seeds=[0,1]", "train.tokens=12800", "train.eval_every=6400")
    out, local = tmp_path / "out", tmp_path / "local"
    words = ["run", study_file, "--out", out, "--device", "cpu", "--executor", "slurm"]
    words += [word for setting in settings for word in ("--set", setting)]
    names = {name: queue.environment[name] for name in ("SLURM_CONF", "PATH")}
    first = start(command, *words, "--slurm", "partition=both, time=5", output=tmp_path / "first", **names)
    config = load_study(str(study_file), settings)
    everything = {entry.name for entry in config.architectures}
    execute(config, local, only=everything, on=Resources(device="cpu"), plugins=(), log=print)
    records = StudyRecords(out)
    tasks = wait_for(lambda: tasks if len(tasks := training()) == 2 else ())
    stopped, lost = sorted(tasks, key=lambda task: queue.place_of(task.id))
    number = queue.place_of(stopped.id)[1]
    going = {node: records.run(*started(out, task)["run"]) for node, task in (("n1", stopped), ("n2", lost))}

    def none_goes_on() -> bool:
        """Stop each run as soon as it trains: either may be first, and would end while the other is waited for."""
        for node in [node for node, run in going.items() if run.last_metrics(1)]:
            queue.signal_tasks(node, signal.SIGSTOP)
            del going[node]
        return not going

    wait_for(none_goes_on, pause=0.01)
    first.kill()
    first.join()
    queue.lose_node("n2")
    with queue.telling(number):
        queue.signal_tasks("n1", signal.SIGCONT)
        second = start(command, *words, output=tmp_path / "second", **names)
        wait_for(lambda: queue.are_waiting(stopped.id, lost.id) or not second.is_alive())
    queue.begin(stopped.id, lost.id)
    queue.start_node("n2")
    second.join(250)
    said = (tmp_path / "second").read_text()
    assert second.exitcode == 0, said
    assert len({*out.glob("slurm/basecap-train-*")}) == 1, said  # the second command waits for the jobs of the first
    assert results(out) == results(local)
    logs = "".join(path.read_text() for path in out.glob("slurm/*/*.log"))
    assert "the job was put back into the queue" in logs and "resumed at step" in logs
    assert not records.busy and len(records.runs()) == 4


def test_any_task_goes_back_into_the_queue_without_the_others(queue):
    """The number of the last one's job is that of the array."""
    number = slurm.submit("#!/bin/bash\nsleep 100\n", "basecap-train-2", 2, {})
    wait_for(lambda: len(training()) == 2)
    assert slurm.requeue(f"{number}_1")
    wait_for(lambda: sorted(task.state for task in slurm.queue()) == ["PENDING", "RUNNING"])
    assert [task.index for task in training()] == [0] and not slurm.requeue(f"{number}_1")


def test_a_cancelled_job_fails_its_run_and_the_command_goes_on(study_file, tmp_path, queue, monkeypatch):
    monkeypatch.setattr("basecap.run.execute.try_new", lambda *given: [])
    out, said, infos = tmp_path / "out", [], []
    long = ("train.tokens=25600000", "train.eval_every=12800000")
    thread = threading.Thread(target=lambda: infos.extend(train(study_file, out, long, log=said.append)))
    thread.start()
    (task,) = wait_for(training)
    run = StudyRecords(out).run("transformer++", 0)
    wait_for(lambda: run.last_metrics(1))
    queue.command("scancel", task.id)
    thread.join(120)
    (info,) = infos
    assert info.status == "failed" and info.message.startswith(f"Slurm job {task.id} was cancelled, see ")
    assert run.info() == info and info.message.endswith("0.log; the run resumes from its last checkpoint.")


def test_what_slurm_refuses_is_said_in_its_words_and_nothing_is_left(study_file, tmp_path, queue):
    with pytest.raises(ConfigError, match=r"^Slurm refuses the jobs: .*invalid partition specified: big.*; correct --"):
        train(study_file, tmp_path / "out", partition="big")
    assert not [*(tmp_path / "out" / "slurm").iterdir()]


def test_nodes_that_do_not_see_the_directory_are_named_by_it(study_file, tmp_path, queue, monkeypatch):
    write = executor.SlurmBatch.script
    monkeypatch.setattr(
        executor.SlurmBatch, "script", lambda self, python, needed: write(self, python, [Path("/elsewhere"), *needed])
    )
    with pytest.raises(ConfigError, match=rf"^the nodes of Slurm do not see {tmp_path}/out; put it on a file system"):
        train(study_file, tmp_path / "out")
    assert not StudyRecords(tmp_path / "out").runs()


def test_a_queue_without_room_says_so_at_once(queue):
    """The cluster takes 40 jobs; `sbatch` alone would wait for minutes."""
    begun = time.monotonic()
    with pytest.raises(slurm.QueueFull):
        slurm.submit("#!/bin/bash\ntrue\n", "basecap-train-0", 40, {})
    assert time.monotonic() - begun < 30
    slurm.submit("#!/bin/bash\ntrue\n", "basecap-train-1", 2, {"hold": ""})
    assert [task.place for task in slurm.queue()] == [("basecap-train-1", 0), ("basecap-train-1", 1)]


def test_tasks_that_a_full_queue_refuses_are_submitted_in_parts(tmp_path, monkeypatch):
    room, taken, said = [2], [], []

    def submit(script, job, tasks, settings):
        if tasks > room[0]:
            raise slurm.QueueFull
        room[0] -= tasks
        taken.append(tasks)
        return "7"

    monkeypatch.setattr(slurm, "submit", submit)
    one = object.__new__(executor.SlurmExecutor)
    one.__dict__ |= {"out": tmp_path, "settings": {}, "needed": [], "log": said.append, "_arrays": {}}
    monkeypatch.setattr(executor.SlurmExecutor, "_shared", lambda self: {})
    places = {}
    left = one._submit("train", [[{"key": f"run {n}"}] for n in range(5)], places)
    assert (
        taken == [2]
        and [*places] == ["run 0", "run 1"]
        and [task[0]["key"] for task in left]
        == [
            "run 2",
            "run 3",
            "run 4",
        ]
    )
    assert one._submit("train", left, places) == left
    room[0] = 3
    assert (one._submit("train", left, places) == [] and taken == [2, 1, 1, 1]) or taken == [2, 3]
    assert len([*(tmp_path / "slurm").glob("basecap-*")]) == len(taken)


def test_jobs_prepare_the_text_together_and_need_no_gpu(study_file, tmp_path, monkeypatch):
    out, jobs, given, said = tmp_path / "out", {}, [], []
    study = load_study(str(study_file), [f"data.cache={tmp_path / 'cache'}"])

    def submit(script, job, tasks, options):
        given.append((tasks, options))
        for task in range(tasks):
            path = str(out / "slurm" / job)
            jobs[job, task] = start(_slurm_job.main, path, str(task), "7", output=tmp_path / str(task))
        return "7"

    def queue():
        alive = [place for place, process in jobs.items() if process.is_alive()]
        return [slurm.QueuedTask(job=job, index=n, state="RUNNING", reason="None", id=f"7_{n}") for job, n in alive]

    monkeypatch.setattr(slurm, "submit", submit)
    monkeypatch.setattr(slurm, "queue", queue)
    monkeypatch.setattr(slurm, "cancel", lambda ids: [process.kill() for process in jobs.values()])
    settings = {"partition": "all", "gres": "gpu:4", "prepare": "2"}
    on = Resources(device="cpu", executor="slurm", settings=settings)
    execution = Execution(study=study, out=out, device="cpu", on=on)
    prepare_by_jobs(execution, said.append)
    assert find_prepared(study.text, tmp_path / "cache") is not None, (tmp_path / "0").read_text()
    assert given == [(2, {"partition": "all"})] and said == ["submitted Slurm job 7: 2 tasks to prepare 2."]
    prepare_by_jobs(execution, said.append)
    assert len(given) == 1
    StudyRecords(out).refuse_foreign()  # the study can start there
    for process in jobs.values():
        process.join()


def test_without_slurm_a_study_is_refused_before_anything_is_written(study_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^executor slurm finds no sbatch on the path; run the command where"):
        train(study_file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_slurm_that_does_not_answer_is_refused_before_anything_is_written(study_file, tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (programs / name).write_text(
            "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact controller' >&2\nexit 1\n"
        )
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(
        ConfigError, match=r"^Slurm does not answer \(.*Unable to contact controller\); run `scontrol ping`"
    ):
        train(study_file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"array": "0-3"}, "array is set by the executor"),
        ({"nodes": "2"}, "a job uses one node and one task"),
        ({"prepare": "all"}, "prepare=all is no number of jobs; write it as prepare=4"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        slurm.check_settings(given)


def test_one_of_several_tasks_of_srun_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    refused = pytest.raises(ConfigError, match=r"^srun started this command 4 times, .*; use one task, or torchrun\.$")
    with refused, processes(None):
        pass

"""Workers: each begins once, an error or a kill costs one job, and results keep an order where one is asked for."""

import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from basecap.system.processes import Kin, WorkerKilled, WorkerPool, usable_cores
from tests.system import jobs


def test_a_worker_begins_once_and_does_job_after_job():
    with WorkerPool(jobs.begin, ["alone"]) as pool:
        found = [future.result() for _, future in pool.run(jobs.report, [1, 2, 3])]
        found += [future.result() for _, future in pool.run(jobs.report, [4])]
    assert [(item, starts) for item, starts, _ in found] == [(item, ["alone"]) for item in (1, 2, 3, 4)]
    assert len({process for *_, process in found}) == 1


def test_a_worker_that_starts_ignores_ctrl_c():
    def press() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.001)
        for child in children:
            os.kill(child.pid, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with WorkerPool(jobs.begin, ["alone"]) as pool:
        ((_, future),) = pool.run(jobs.blocked, [1])
    pressing.join()
    assert signal.SIGINT not in future.result() | jobs.blocked(1)


def test_workers_work_side_by_side_and_results_come_as_they_end_or_in_order(tmp_path: Path):
    there, first, second = (str(tmp_path / name) for name in ("there", "first", "second"))
    Path(there).touch()
    with WorkerPool(jobs.begin, ["a", "b"]) as pool:
        running = pool.run(jobs.wait_for, [(first, second), (there, there)])
        assert next(running)[1].result() == "there"
        Path(first).touch()  # not earlier: of two jobs that end at the same moment, either may come first
        assert [future.result() for _, future in running] == ["second"]
        Path(first).unlink()
        items = [(first, second), (there, first)]  # the first job ends after the second
        assert [future.result() for future in pool.run_in_order(jobs.wait_for, items)] == ["second", "first"]


def test_a_pool_that_is_narrowed_starts_no_more_workers():
    with WorkerPool(jobs.begin, ["a", "b", "c"]) as pool:
        pool.most = 1
        found = [future.result() for _, future in pool.run(jobs.report, [1, 2, 3])]
    assert [starts for _, starts, _ in found] == [["a"]] * 3 and len({process for *_, process in found}) == 1


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of the running jobs the first ends; all that ran then, by item their places, each time one ends."""
    live: dict[str, tuple[str, Future]] = {}
    ran: list[dict[str, str]] = []

    class Worker:
        def __init__(self, start: bytes, place: str, pools: object):
            self.place, self.kind = place, None

        def take(self, job: object, item: str) -> Future:
            live[item] = self.place, Future()
            return live[item][1]

    def wait(running: dict, return_when: str) -> SimpleNamespace:
        ran.append({item: place for item, (place, _) in live.items()})
        _, ended = live.pop(next(iter(live)))
        ended.set_result(len(live))
        return SimpleNamespace(done=[ended])

    monkeypatch.setattr("basecap.system.processes._Worker", Worker)
    monkeypatch.setattr("basecap.system.processes.wait", wait)
    return ran


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("a0 b0 c0 a1 b1 c1", ["a0 c0 c1", "b0 b1 a1"]),
        ("a0 b0 a1 b1 a2 b2", ["a0 a1 a2", "b0 b1 b2"]),
        ("a0 a1 a2 b0 b1 b2", ["a0 a2 b1", "a1 b0 b2"]),
        ("a0 b0 a1 c1", ["a0 a1", "b0 c1"]),
        ("a0 b0 c1 a1", ["a0 a1", "b0 c1"]),
    ],
)
def test_a_worker_does_items_of_one_kind_one_after_the_other_within_a_turn(
    ran: list[dict[str, str]], items: str, expected: list[str]
):
    """The jobs of two workers end in turn; items have a kind and a turn."""
    with WorkerPool(jobs.begin, range(2), ["one", "two"]) as pool:
        order = [item for item, _ in pool.run(jobs.report, items.split(), kin=lambda item: Kin(item[1], item[0]))]
    places = {item: place for together in ran for item, place in together.items()}
    assert {*order} == {*items.split()}
    assert [" ".join(item for item in order if places[item] == place) for place in ("one", "two")] == expected


@pytest.mark.usefixtures("ran")
def test_a_crowded_job_is_done_again_beside_fewer_and_at_last_alone():
    """Items are the others that a job bears."""
    bears = {"any": 9, "none": 0, "some": 9, "two": 2, "more": 9, "hopeless": -1}

    def crowded(item: str, future: Future, shared: set) -> str | None:
        return "machine" if future.result() > bears[item] else None

    with WorkerPool(jobs.begin, [*"abcd"]) as pool:
        ended = [(item, future.result()) for item, future in pool.run(jobs.report, [*bears], crowded)]
    assert ended == [("any", 3), ("some", 3), ("two", 2), ("more", 2), ("none", 0), ("hopeless", 0)]


@pytest.mark.parametrize("lacks", ["place", "machine"])
def test_a_job_that_lacks_the_memory_of_its_gpu_has_that_gpu_alone(lacks: str, ran: list[dict[str, str]]):
    """Of the jobs on two GPUs two are crowded until they are alone; what would fit beside them waits."""
    crowded = {*"ad"}
    with WorkerPool(jobs.begin, range(4), ["one", "two"] * 2) as pool:
        running = pool.run(
            jobs.report, [*"abcdefgh"], lambda item, _, shared: lacks if item in crowded and lacks in shared else None
        )
        assert {item for item, _ in running} == {*"abcdefgh"}
    assert len(ran) > 8
    for item in crowded:
        last = [together for together in ran if item in together][-1]
        assert [*last.values()].count(last[item]) == 1
    beside = [together for together in ran[-2:] if len(together) > 1]
    assert [{*together} for together in beside] == [crowded] * (lacks == "place")


def test_an_error_or_a_kill_costs_one_job():
    with WorkerPool(jobs.begin, ["alone"]) as pool:
        errors = {item: future.exception() for item, future in pool.run(jobs.divide, [0, 4])}
        assert isinstance(errors[0], ZeroDivisionError) and errors[4] is None
        killed = {item: future.exception() for item, future in pool.run(jobs.end_at_zero, [1, 0, 2])}
        assert isinstance(killed[0], WorkerKilled) and killed[1] is killed[2] is None


def test_a_killed_worker_is_gone_when_its_job_ends(monkeypatch: pytest.MonkeyPatch):
    """Else the process might still hold the lock of its run, which would count as another command's."""
    gone, join = [], BaseProcess.join

    def slow(process: BaseProcess) -> None:
        time.sleep(0.2)
        join(process)
        gone.append(process.exitcode)

    monkeypatch.setattr(BaseProcess, "join", slow)
    with WorkerPool(jobs.begin, ["alone"]) as pool:
        seen = [list(gone) for _ in pool.run(jobs.end_at_zero, [0])]
    assert seen == [[-signal.SIGKILL]]


def test_workers_killed_at_any_moment_cost_a_job_each_and_no_job_is_lost():
    """As the system kills them when memory is short: from outside, while they start, work or wait."""
    moments, ended, kills = random.Random(time.time_ns()), threading.Event(), []

    def kill() -> None:
        while not ended.is_set() and len(kills) < 4:
            time.sleep(moments.uniform(0.0, 0.4))
            if workers := multiprocessing.active_children():
                os.kill(moments.choice(workers).pid, signal.SIGKILL)
                kills.append(time.monotonic())

    system = threading.Thread(target=kill)
    with WorkerPool(jobs.begin, ["a", "b"]) as pool:
        system.start()
        found = {item: future.exception() for item, future in pool.run(jobs.nap, range(40))}
        ended.set()
        system.join()
    assert sorted(found) == [*range(40)] and kills
    failed = [error for error in found.values() if error is not None]
    assert len(failed) <= len(kills) and all(isinstance(error, WorkerKilled) for error in failed)


def test_in_order_a_killed_job_is_tried_again(tmp_path: Path):
    with WorkerPool(jobs.begin, ["alone"]) as pool:
        paths = [str(tmp_path / name) for name in ("one", "two")]
        assert [future.result() for future in pool.run_in_order(jobs.end_once, paths)] == ["one", "two"]
        always, fine = pool.run_in_order(jobs.end_at_zero, [0, 1])
        assert isinstance(always.exception(), WorkerKilled) and fine.result() == 1


def test_a_worker_that_cannot_begin_fails_its_job():
    with WorkerPool(jobs.refuse, ["here"]) as pool:
        ((_, future),) = pool.run(jobs.divide, [1])
        assert isinstance(future.exception(), ValueError) and str(future.exception()) == "cannot begin here"


def test_no_worker_outlives_the_context(tmp_path: Path):
    never = (str(tmp_path / "never"), str(tmp_path / "file"))
    with pytest.raises(KeyboardInterrupt), WorkerPool(jobs.begin, ["a", "b"]) as pool:
        running = pool.run(jobs.wait_for, [(str(tmp_path), str(tmp_path / "file")), never])
        next(running)
        raise KeyboardInterrupt  # the second job would wait forever
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 3), ("150000 100000", 2), ("20000 100000", 1), (None, 3)])
def test_a_share_of_the_machine_counts_as_its_cores(quota: str | None, cores: int, monkeypatch: pytest.MonkeyPatch):
    def read_text(path: Path) -> str:
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 4})
    monkeypatch.setattr(Path, "read_text", read_text)
    assert usable_cores() == cores

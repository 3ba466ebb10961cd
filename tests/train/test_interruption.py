"""SIGINT, SIGTERM and SIGKILL at any moment cost no more than the time since the last checkpoint, and no bit."""

import ctypes
import os
import random
import signal
import time

import pytest
import torch

from basecap.errors import Interrupted
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train import checkpoint, interruption, loop
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, expendable, immediate, listening
from basecap.train.loop import DevicePlacement, Trainer
from tests.forks import FORKS, start
from tests.train import interruptions
from tests.train.conftest import BATCH, LENGTH, RandomStream, config

PLACEMENT = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")
EVERY = BATCH * LENGTH


def train(model, path, options, *, at_batch=None, at_evaluation=None, number=signal.SIGTERM):
    """Train, with a signal while a batch is read or an evaluation runs; return what was logged and evaluated."""
    log, evaluated = [], []

    class Stream(RandomStream):
        def batch(self, seed, step, *arguments, **options):
            if step == at_batch:
                os.kill(os.getpid(), number)
            return super().batch(seed, step, *arguments, **options)

    def evaluate(model, step, tokens):
        if step == at_evaluation:
            os.kill(os.getpid(), number)
            time.sleep(60)
        evaluated.append(step)

    model, records = LanguageModel(model.config).initialise(0), RunRecords(path)
    with listening(), deferred():
        trainer = Trainer(model, options, 0, workload=Stream(), records=records, placement=PLACEMENT)
        trainer.run("test", evaluate, log.append)
    return log, evaluated


def losses(path):
    return [row["train_loss"] for row in RunRecords(path).metrics()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_within_a_step_leaves_a_checkpoint_of_that_step(model, tmp_path, number):
    options, path = config(eval_every=5 * EVERY), tmp_path / "stopped"
    with pytest.raises(Interrupted) as stopped:
        train(model, path, options, at_batch=8, number=number)
    assert str(stopped.value) == (
        "test: stopped at step 8 of 20 with a checkpoint; run the same command again to resume."
    )
    assert stopped.value.number == number and len(losses(path)) == 8
    assert checkpoint.latest(path / "resume").name == "step-8"
    assert train(model, path, options) == (["test: resumed at step 8 of 20."], [10, 15, 20])
    train(model, tmp_path / "straight", options)
    assert losses(path) == losses(tmp_path / "straight")


@pytest.mark.parametrize("every", [5, 3])
def test_a_signal_ends_an_evaluation_at_once(model, tmp_path, every):
    options = config(eval_every=5 * EVERY, checkpoint_every=every * EVERY)
    with pytest.raises(Interrupted, match="stopped at step 10 of 20 with a checkpoint"):
        train(model, tmp_path, options, at_evaluation=10)
    assert checkpoint.latest(tmp_path / "resume").name == "step-10"
    assert train(model, tmp_path, options) == (["test: resumed at step 10 of 20."], [10, 15, 20])


def test_a_trained_run_is_not_trained_again_because_its_evaluation_was_interrupted(model, tmp_path):
    options = config(eval_every=20 * EVERY, checkpoint_every=100 * EVERY)

    def evaluate(model, step, tokens):
        raise RuntimeError("killed")

    trainer = Trainer(model, options, 0, workload=RandomStream(), records=RunRecords(tmp_path), placement=PLACEMENT)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.run("test", evaluate)
    assert [path.name for path in (tmp_path / "resume").iterdir()] == ["step-20"]
    trained = losses(tmp_path)
    assert train(model, tmp_path, options) == (["test: resumed at step 20 of 20."], [20])
    assert losses(tmp_path) == trained and len(trained) == 20


def test_a_signal_at_the_end_of_a_run_lets_it_be_recorded_as_finished():
    done = []
    with (
        listening(),
        pytest.raises(Interrupted, match=r"^interrupted; run the same command again to resume\.$"),
        deferred(),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("recorded")
    assert done == ["recorded"]


def test_a_checkpoint_is_due_after_some_time_unless_the_study_says_how_often(model, tmp_path, monkeypatch):
    saved = []
    complete = checkpoint.complete
    monkeypatch.setattr(checkpoint, "complete", lambda *args: saved.append(args[1]) or complete(*args))
    every, asked = {"eval_every": 20 * EVERY}, {"checkpoint_every": 10 * EVERY}
    assert loop.CHECKPOINT_SECONDS == 600
    for seconds, options, expected in ((600, every, [20]), (0, every, [*range(1, 21)]), (0, every | asked, [10, 20])):
        monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", seconds)
        train(model, tmp_path / f"{seconds} {len(options)}", config(**options))
        assert saved == expected
        saved.clear()


def test_outside_of_a_run_a_signal_raises_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with listening(), pytest.raises(Interrupted) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert stopped.value.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    assert interruption.requested() is None  # work that comes later in this process is not stopped by it


def test_the_same_request_may_come_twice_and_one_that_came_before_ends_an_evaluation(monkeypatch):
    ended = []
    with listening(), pytest.raises(Interrupted), deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # as a launcher passes it on
        with pytest.raises(Interrupted), immediate():
            ended.append("evaluation")
    assert not ended


def test_a_scheduler_may_ask_again_and_again(monkeypatch):
    monkeypatch.setattr(interruption, "SECOND_SIGNAL_AFTER", 0.0)
    with listening(once=True), pytest.raises(Interrupted) as stopped, deferred():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.number == signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with listening(), deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert interruption.requested() is None
    finally:
        signal.signal(signal.SIGINT, before)


def _stubborn(ready) -> None:
    interruption.SECOND_SIGNAL_AFTER = 0.05
    with listening(), deferred():
        ready.set()
        while True:
            time.sleep(0.01)


def test_a_second_signal_ends_the_process_at_once():
    ready = FORKS.Event()
    process = FORKS.Process(target=_stubborn, args=(ready,))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGTERM)
    process.join(0.3)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == -signal.SIGTERM


def _in_one_long_operation(ready) -> None:
    interruption.PATIENCE = 0.05
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with listening(), expendable():
        # as an operation of PyTorch, sleep does not notice that a signal came
        signal.pthread_sigmask(signal.SIG_BLOCK, interruption.SIGNALS)
        ready.set()
        ctypes.CDLL(None).sleep(60)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_ends_work_whose_operation_takes_minutes_if_nothing_of_it_is_kept(numbers, tmp_path):
    ready = FORKS.Event()
    process = start(_in_one_long_operation, ready, output=tmp_path / "output")
    assert ready.wait(60)
    for number in numbers:
        assert process.is_alive()
        os.kill(process.pid, number)
        process.join(0.3)
    process.join(10)
    assert process.exitcode == 128 + numbers[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that no signal interrupts."""
    path = tmp_path_factory.mktemp("straight")
    assert interruptions.run(path) == 0
    return path


@pytest.mark.parametrize("number", interruptions.SIGNALS)
def test_a_signal_while_a_checkpoint_is_written_changes_no_bit(straight, tmp_path, number):
    path, killed = tmp_path / "run", number == signal.SIGKILL
    assert interruptions.run(path, in_write=number) == (-number if killed else 128 + number)
    records, steps = RunRecords(path), checkpoint.stored(path / "resume")
    trained, evaluated = len(records.metrics()), {record.step for record in records.evals()}
    assert trained >= interruptions.EVALUATED in evaluated
    if killed:
        assert [*steps] == [4, 8] and list((path / "resume").glob(".partial-12-*"))
    else:
        assert [*steps] == [12, trained]
    assert interruptions.run(path) == 0
    assert interruptions.outcome(path) == interruptions.outcome(straight)


def test_signals_at_random_moments_change_no_bit(straight, tmp_path):
    expected, most = interruptions.outcome(straight), interruptions.duration(straight)
    moments = random.Random(time.time_ns())
    for number in interruptions.SIGNALS:
        codes = {0, -number} if number == signal.SIGKILL else {0, 128 + number}
        for index in range(3):
            path, after = tmp_path / f"{number}-{index}", moments.uniform(0, 0.8 * most)
            assert interruptions.run(path, number, after) in codes
            assert interruptions.run(path) == 0
            assert interruptions.outcome(path) == expected, (number, after)

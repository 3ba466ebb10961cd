"""Interrupts a small run by signals at random moments, resumes it and compares it with the undisturbed one.

Usage: python -m tests.train.interruptions [TIMES]: so many moments for each of SIGINT, SIGTERM and SIGKILL.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from basecap.data.workload import Batch
from basecap.errors import Interrupted
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.records.measured import Record
from basecap.train import checkpoint
from basecap.train.distributed import Processes
from basecap.train.interruption import deferred, listening
from basecap.train.loop import DevicePlacement, Trainer
from tests.forks import FORKS
from tests.train.conftest import BATCH, LENGTH, VOCAB, RandomStream, config

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
STEPS = 50
#: A step with a checkpoint, and a step after it with an evaluation and before the next checkpoint.
WRITTEN, EVALUATED = 12, 14
MODEL = model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH)
OPTIONS = config(
    tokens=STEPS * BATCH * LENGTH,
    eval_every=7 * BATCH * LENGTH,
    checkpoint_every=4 * BATCH * LENGTH,
    average=0.1,
)


class LoggedStream(RandomStream):
    """Notes which tokens each step is trained on."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        rows = super().batch(seed, step, batch, rank, world)
        with self.path.open("a") as file:
            file.write(f"{step} {hashlib.sha256(rows.targets.numpy().tobytes()).hexdigest()}\n")
        return rows


def train(path: Path, in_write: int | None = None) -> None:
    """Train in `path`, or go on there; the exit code is that of the command line.

    The process gets the signal `in_write` while its thread writes the checkpoint of `WRITTEN` and later steps have
    been trained and evaluated.
    """
    torch.set_num_threads(1)
    path.mkdir(exist_ok=True)
    records, model = RunRecords(path), LanguageModel(MODEL)
    finish = checkpoint.finish

    def interrupted(partial: Path, step: int, *given: object) -> None:
        if step == WRITTEN and in_write is not None:
            while max(record.step for record in records.evals()) < EVALUATED:
                time.sleep(0.001)
            os.kill(os.getpid(), in_write)
            time.sleep(0.1)
        finish(partial, step, *given)

    checkpoint.finish = interrupted
    tokens = torch.arange(2 * (LENGTH + 1)).view(2, -1) % VOCAB

    def evaluate(model: LanguageModel, step: int, trained: int) -> None:
        value = model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean().item()
        for subset in ("one", "two"):
            time.sleep(0.005)
            found = {"subset": subset, "metric": "loss", "value": value, "n": 32}
            records.append_evals([Record(step=step, tokens=trained, eval="test", **found)])

    try:
        with listening(), deferred():
            stream, placement = (
                LoggedStream(path / "tokens"),
                DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32"),
            )
            trainer = Trainer(model.initialise(0), OPTIONS, 0, workload=stream, records=records, placement=placement)
            trainer.run("run", evaluate)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)


def outcome(path: Path) -> tuple[object, ...]:
    """Return what a finished run left: its curve, its evaluations, one hash over all tokens, one over all weights."""
    records = RunRecords(path)
    curve = [(row["step"], row["train_loss"], row["grad_norm"]) for row in records.metrics()]
    seen = dict(line.split() for line in (path / "tokens").read_text().splitlines() if line.count(" ") == 1)
    tokens = hashlib.sha256("".join(seen[str(step)] for step in range(STEPS)).encode()).hexdigest()
    weights = hashlib.sha256()
    for name in ("model.safetensors", "optimiser.safetensors", "average.safetensors"):
        weights.update((checkpoint.latest(records.resume) / name).read_bytes())
    return curve, records.evals(), tokens, weights.hexdigest()


def run(path: Path, number: int | None = None, after: float = 0.0, in_write: int | None = None) -> int:
    """Train in a process of its own, which gets the signal `number` so many seconds `after` its first step."""
    process = FORKS.Process(target=train, args=(path, in_write))
    process.start()
    if number is not None:
        while process.is_alive() and not (path / "metrics.jsonl").exists():
            time.sleep(0.001)
        process.join(after)
        if process.is_alive():
            os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


def duration(path: Path) -> float:
    """Return about how many seconds the steps and evaluations of a run took."""
    return sum(row["seconds"] for row in RunRecords(path).metrics()) + 0.01 * STEPS / 7


def main(times: int) -> None:
    """Interrupt, resume and compare; prints a line for each signal."""
    with tempfile.TemporaryDirectory() as directory:
        straight = Path(directory) / "straight"
        assert run(straight) == 0
        expected, most = outcome(straight), duration(straight)
        for number in SIGNALS:
            stopped = 0
            for index in range(times):
                path = Path(directory) / f"{number}-{index}"
                stopped += run(path, number, random.uniform(0, most)) != 0
                assert run(path) == 0 and outcome(path) == expected, path
            print(f"{signal.Signals(number).name}: {times} runs, {stopped} of them interrupted, all equal to the bit")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

"""Trains a few steps in two processes, is interrupted by a signal to one of them and resumes; or once each."""

import hashlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from basecap.data.workload import Batch
from basecap.errors import Interrupted
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import without_numba
from basecap.records import RunRecords
from basecap.system.environment import choose_device
from basecap.train.config import TrainConfig
from basecap.train.deterministic import deterministic
from basecap.train.distributed import Processes, processes
from basecap.train.interruption import deferred, listening
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import BATCH, LENGTH, VOCAB, UnevenStream, config


class InterruptedStream(UnevenStream):
    """Sends SIGTERM to the second process at step 7, once."""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(seed, step, batch, rank, world)


def main(path: Path) -> None:
    """Train one model together with the other process."""
    with processes(torch.device("cpu")) as group:
        placement = DevicePlacement.choose(torch.device("cpu"), group, "fp32")
        try:
            train(path, InterruptedStream(), placement)
        except Interrupted as interrupted:
            assert interrupted.number == signal.SIGTERM, interrupted
            assert (group.rank == 0) == ("stopped at step 7 of 20 with a checkpoint" in str(interrupted)), interrupted
            train(path, UnevenStream(), placement)


def train(path: Path, stream: UnevenStream, placement: DevicePlacement) -> None:
    """Train, and let go of the wrapped model before the processes part: gloo may hang otherwise."""
    model = LanguageModel(model_config("transformer++", hidden=32, vocab=VOCAB, layers=1, max_length=LENGTH))
    options, records = config(micro_batch=1), RunRecords(path)
    with listening(), deferred():
        trainer = Trainer(model.initialise(0), options, 0, workload=stream, records=records, placement=placement)
        trainer.run("two", lambda model, step, tokens: None, print)


def train_each(names: Sequence[str], path: Path, device: str) -> None:
    """Write what `bits` returns of these architectures, trained together with the other process."""
    own = choose_device(device)
    with processes(own) as group:
        found = bits(names, group, own)
        if group.is_leader:
            path.write_text(json.dumps(found))


def bits(names: Sequence[str], group: Processes, device: torch.device) -> dict[str, list]:
    """Train each of these architectures for a step of four micro-batches, all in this process or two in each.

    On a GPU in bfloat16, with sizes for which the kernels of all ops run. Returns by architecture a digest of the
    weights after the step, the loss and the norm of the gradients.
    """
    length, hidden = (512, 128) if device.type == "cuda" else (LENGTH, 32)
    options = TrainConfig(
        tokens=BATCH * length, batch=BATCH, micro_batch=1, lr=1e-2, warmup=0, deterministic=True, compile=False
    )
    placement, found = DevicePlacement.choose(device, group, "auto"), {}
    for name in names:
        model = LanguageModel(model_config(name, hidden=hidden, vocab=VOCAB, layers=2, max_length=length))
        model = model.initialise(0).to(device)
        with tempfile.TemporaryDirectory() as folder, deterministic(options, device), without_numba():
            records, workload = RunRecords(Path(folder) / "run"), UnevenStream(length)
            trainer = Trainer(model, options, 0, workload=workload, records=records, placement=placement)
            trainer.run(name, lambda model, step, tokens: None)
            metrics = records.metrics() if group.is_leader else []
        weights = b"".join(x.detach().cpu().numpy().tobytes() for x in model.parameters())
        numbers = [(row["train_loss"], row["grad_norm"]) for row in metrics]
        found[name] = [hashlib.sha256(weights).hexdigest(), *numbers]
    return found

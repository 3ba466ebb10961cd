"""The training loop. It knows tokens, loss and optimiser groups, nothing of architectures.

One step: take the batch that (seed, step) determines, accumulate gradients over micro-batches, refuse a loss that is
not finite, clip, update, record. After the steps that the timetable names it writes a checkpoint and hands the model,
in evaluation mode and with averaged weights where `train.average` is set, to the evaluations it was given. The
checkpoint comes first, so that no step is trained again because an evaluation was interrupted: a resume forgets what
was recorded after its checkpoint, evaluates that one where it should be, and trains on from there.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from basecap.data.workload import Batch, Workload
from basecap.errors import Interrupted, TrainingError
from basecap.files import settle, writing
from basecap.models.language_model import LanguageModel
from basecap.progress import progress
from basecap.records import RunRecords
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.config import Timetable, TrainConfig
from basecap.train.diagnose import first_bad_module
from basecap.train.distributed import Processes
from basecap.train.interruption import immediate, requested
from basecap.train.optim import build_optimiser, clip_gradients, set_learning_rate
from basecap.train.schedule import learning_rate, warmup_steps

T = TypeVar("T")

#: Called in every process with the model and the numbers of steps and tokens done; appends its own records and returns
#: whether the run ends there, alike in all processes. What it raises, in one of several processes, it raises in all of
#: them: see `measured`.
Evaluate = Callable[[LanguageModel, int, int], bool | None]


#: Seconds after which a checkpoint is due, where the study does not say how often.
CHECKPOINT_SECONDS = 600.0


def resolve(precision: str, device: torch.device) -> Literal["bf16", "fp32"]:
    """Return the precision that "auto" means on a device, bf16 on a GPU and fp32 on a CPU, and any other as it is."""
    return "bf16" if precision == "bf16" or (precision == "auto" and device.type == "cuda") else "fp32"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run trains: device, processes, precision."""

    device: torch.device
    processes: Processes
    bf16: bool

    @classmethod
    def choose(cls, device: torch.device, processes: Processes, precision: str) -> "Place":
        """Resolve the precision, see `resolve`."""
        return cls(device=device, processes=processes, bf16=resolve(precision, device) == "bf16")

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which products run in the run's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


class Step(NamedTuple):
    """What a step came to: its loss, the next batch, and whether any process wants to stop or wants a checkpoint."""

    loss: float
    following: Batch
    stop: bool
    save: bool


class Trainer:
    """One run: a model, its data, its records."""

    def __init__(
        self,
        model: LanguageModel,
        config: TrainConfig,
        seed: int,
        *,
        workload: Workload,
        records: RunRecords,
        place: Place,
    ):
        """Take an initialised model and move it to the device; raises ConfigError for batches that do not divide."""
        self.model = model.to(place.device)
        self.config = config
        self.seed = seed
        self.workload = workload
        self.records = records
        self.place = place
        self.timetable = Timetable(config, workload.length)
        self.micro_batch = config.forward_batch(place.processes.world)
        self.optimiser = build_optimiser(model, model.recipe(), config)
        self.average = None if config.average is None else WeightAverage(self.model, config.average)
        if place.device.type == "cuda" if config.compile is None else config.compile:
            model.compile_training()
        self.module = place.processes.wrap(model)
        self._saved_step, self._saved_time = 0, time.monotonic()
        self._show: Callable[[str], None] = lambda words: None

    def note(self, words: str) -> None:
        """Show words beside the progress until the next step: what is being evaluated."""
        self._show(words)

    def run(self, label: str, evaluate: Evaluate, log: Callable[[str], None] = lambda line: None) -> int | None:
        """Train to the end, from the newest checkpoint that is intact if there is one.

        Returns:
            After how many steps an evaluation ended the run early; None where none did.

        Args:
            label: how the run is called.
            evaluate: see `Evaluate`.
            log: takes a sentence, such as where the run resumes.

        Raises:
            Interrupted: a signal asked this process or another one to stop; a checkpoint was written.
            TrainingError: a loss that is not finite, and with several processes what fails in one of them while it
                evaluates, reads or writes; all processes raise it alike. Other errors may be of one process alone.
            CheckpointError, DataError: files that cannot be read or written, with one process.
        """
        done = self._resume(lambda words: log(f"{label}: {words}"))
        tokens = self.timetable.step_tokens
        with self._progress(label, self.timetable.steps * tokens) as advance:
            advance(done * tokens)
            self._show = partial(advance, 0)
            if done and self._evaluate(label, evaluate, done):
                return done
            batch = self._batch(done)
            while done < self.timetable.steps:
                step = self._step(done, batch)
                done, batch = done + 1, step.following
                loss = f"loss {step.loss:.3f}"
                advance(tokens, note=loss)
                if step.stop:
                    self._stop(label, done)
                if step.save or self.timetable.saves(done):
                    self._save(done)
                if self._evaluate(label, evaluate, done):
                    return done
                self.note(loss)
        return None

    def _evaluate(self, label: str, evaluate: Evaluate, done: int) -> bool:
        """Evaluate where the timetable says so, return whether that ends the run; Interrupted in all processes."""
        if not self.timetable.evaluates(done):
            return False
        ended = self._measure(evaluate, done)
        if ended is None:
            self._stop(label, done)
        if ended:
            self._save(done)
        return ended

    def _measure(self, evaluate: Evaluate, done: int) -> bool | None:
        """Store weights that stay and evaluate; return whether the run ends here, None where a signal cut it short."""
        group, keeps = self.place.processes, self.timetable.keeps(done)
        self.model.eval()
        try:
            # weights change places and are written where no signal raises
            with self.average.applied() if self.average else contextlib.nullcontext():
                if keeps:
                    group.lead(lambda: checkpoint.save_weights(self.records.weights, self.model, done))
                with immediate() if group.world == 1 else contextlib.nullcontext():
                    ended = bool(evaluate(self.model, done, done * self.timetable.step_tokens))
                if ended and not keeps:
                    group.lead(lambda: checkpoint.save_weights(self.records.weights, self.model, done))
                return ended
        except Interrupted:
            return None
        finally:
            self.model.train()

    def _stop(self, label: str, done: int) -> NoReturn:
        self._save(done)
        words = f"{label}: stopped at step {done} of {self.timetable.steps} with a checkpoint"
        words += "; run the same command again to resume."
        raise Interrupted(requested() or signal.SIGTERM, words if self.place.processes.leads else "")

    def _save(self, done: int) -> None:
        """Write the checkpoint of `done` steps unless it stands."""
        if self._saved_step != done:
            self.place.processes.lead(lambda: self._write(done))
            self._saved_step, self._saved_time = done, time.monotonic()

    def _save_due(self) -> bool:
        """Whether the leading process wants a checkpoint for the time that has passed since the last one."""
        waited = time.monotonic() - self._saved_time >= CHECKPOINT_SECONDS
        return waited and self.place.processes.leads and self.config.checkpoint_every is None

    def _write(self, done: int) -> None:
        with writing(self.records.path / "metrics.jsonl"):
            settle(self.records.path)  # nothing that stands before a checkpoint is lost where that is kept
        checkpoint.save(self.records.checkpoints, self.model, self.optimiser, done, self.average)

    def _progress(self, label: str, total: int) -> contextlib.AbstractContextManager[Callable[..., None]]:
        """Show progress in the leading process alone."""
        if self.place.processes.leads:
            return progress(label, total=total, unit="tokens")
        return contextlib.nullcontext(lambda amount, note="": None)

    def _resume(self, log: Callable[[str], None]) -> int:
        group = self.place.processes
        path = group.together(lambda: checkpoint.intact(self.records.checkpoints, log) if group.leads else None)[0]
        done = group.together(lambda: self._restore(path))[group.rank]
        group.lead(lambda: self.records.rewind(done))
        steps, warmup = self.timetable.steps, warmup_steps(self.config.warmup, self.timetable.steps)
        if done and group.leads:
            log(f"resumed at step {done} of {steps}.")
        elif warmup < steps <= self.config.warmup and group.leads:
            log(f"warms up for {warmup} steps, a tenth of its {steps}, not for {self.config.warmup} (train.warmup).")
        self._saved_step = done
        return done

    def _restore(self, path: Path | None) -> int:
        return 0 if path is None else checkpoint.restore(path, self.model, self.optimiser, self.average)

    def _batch(self, step: int) -> Batch:
        group = self.place.processes
        return self.workload.batch(self.seed, step, self.config.batch, rank=group.rank, world=group.world)

    def _split(self, batch: Batch) -> Iterator[Batch]:
        """Yield the micro-batches: as many more rows as there are in the whole batch where sequences are short."""
        share = self.config.batch // self.place.processes.world
        return batch.split(self.micro_batch * len(batch) // share)

    def _step(self, step: int, batch: Batch) -> Step:
        """Update once; the next batch is read while the device works."""
        began = time.perf_counter()
        config, group = self.config, self.place.processes
        rate = learning_rate(
            step,
            self.timetable.steps,
            peak=config.lr,
            final=config.final_lr,
            warmup=config.warmup,
            schedule=config.schedule,
        )
        set_learning_rate(self.optimiser, rate)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self._accumulate(batch)
        norm = clip_gradients(self.model, config)
        following = self._batch(step + 1)
        asked = torch.tensor([requested() is not None, self._save_due()], dtype=loss.dtype, device=loss.device)
        shared = group.mean(torch.cat([loss[None], asked]))
        mean_loss, stop, save, grad_norm = torch.cat([shared, norm.detach()[None]]).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            self._refuse(step, batch, "loss" if not math.isfinite(mean_loss) else "gradients")
        self.optimiser.step()
        if self.average is not None:
            self.average.update(step + 1)
        if group.leads:
            seconds = time.perf_counter() - began
            self.records.append_metrics(
                {
                    "step": step + 1,
                    "tokens": (step + 1) * self.timetable.step_tokens,
                    "train_loss": mean_loss,
                    "lr": rate,
                    "grad_norm": grad_norm,
                    "tokens_per_s": self.timetable.step_tokens / seconds,
                    "seconds": seconds,
                }
            )
        return Step(mean_loss, following, stop > 0, save > 0)

    def _accumulate(self, batch: Batch) -> Tensor:
        """Run forward and backward over the micro-batches; return this process's part of the step's loss.

        The mean of the parts over the processes, like that of the gradients, is the mean over all targets of the step,
        however many each row, micro-batch or process has.
        """
        group, device = self.place.processes, self.place.device
        counts = [int((part.targets >= 0).sum()) for part in self._split(batch)]
        share = group.mean(torch.full((), sum(counts), dtype=torch.float64, device=device)).clamp(min=1 / group.world)
        total = torch.zeros((), device=device)
        for index, (part, count) in enumerate(zip(self._split(batch.to(device)), counts, strict=True)):
            with group.unsynchronised(self.module, last=index + 1 == len(counts)):
                with self.place.autocast():
                    loss = self.module(*part.parts) * (count / share).float()
                loss.backward()
            total += loss.detach()
        return total

    def _refuse(self, step: int, batch: Batch, what: Literal["loss", "gradients"]) -> None:
        """Raise TrainingError, alike in all processes, that names what is first bad in any of them."""
        found = self.place.processes.together(lambda: self._first_bad(batch))
        bad = [(rank, where) for rank, where in enumerate(found) if where is not None]
        if bad:
            rank, where = bad[0]
            where += f" in process {rank}" if len(found) > 1 else ""
        elif what == "gradients":
            where = "the backward pass"
        else:  # such as compiled code that computes otherwise, or a module that changes as it is called
            every = "any module of any process" if len(found) > 1 else "any module"
            where = f"not found in {every} when the forward passes of this step are repeated"
        raise TrainingError(
            f"the {what} stopped being finite at step {step + 1}; first bad: {where}. "
            "Lower train.lr or mend that module."
        )

    def _first_bad(self, batch: Batch) -> str | None:
        """Look at all sequences of this process, in the pieces that were computed; None where none of them is bad."""
        for part in self._split(batch.to(self.place.device)):
            with self.place.autocast():
                where = first_bad_module(self.model, *part.parts)
            if where is not None:
                return where
        return None


def measured(group: Processes, action: Callable[[], T]) -> list[T]:
    """Act in every process, which a signal to any of them cuts short, and return what each returned, by rank.

    Raises:
        Interrupted: a signal came; with several processes, in all of them.
        SharedError: `action` failed in one of several processes, in all of them.
    """
    if group.world == 1:
        return [action()]

    def cut() -> tuple[bool, T | None]:
        try:
            with immediate():
                return False, action()
        except Interrupted:
            return True, None

    outcomes = group.together(cut)
    if any(stopped for stopped, _ in outcomes):
        raise Interrupted(requested() or signal.SIGTERM)
    return [cast(T, found) for _, found in outcomes]

"""The training loop. It handles tokens, loss and optimiser groups, and is the same for all architectures.

One step: get the batch of (seed, step), accumulate gradients over micro-batches, raise an error for a loss that is not
finite, clip, update, record. After the steps of the timetable the loop copies a checkpoint, which a thread writes, and
passes the model, in evaluation mode and with averaged weights if `train.average` is set, to the evaluations. The
checkpoint comes first, so that no step is trained again when a signal interrupts an evaluation. After a kill the rows
of a step may be there and its checkpoint not: a resumed run discards everything recorded after its checkpoint,
evaluates the checkpoint if that is due, and continues training.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from basecap.data.workload import Batch, Workload
from basecap.errors import CheckpointError, DataError, Interrupted, LostDirectory, TrainingError
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.records.branches import branch_of, finish_branch, start_branch
from basecap.system.progress import Pauses, progress
from basecap.train import checkpoint
from basecap.train.average import WeightAverage
from basecap.train.config import Branch, Timetable, TrainConfig
from basecap.train.copies import lay_out
from basecap.train.diagnose import describe_fault, first_bad_module
from basecap.train.graphs import graphed
from basecap.train.interruption import immediate, requested
from basecap.train.optim import build_optimiser, set_learning_rate
from basecap.train.placement import DevicePlacement
from basecap.train.step import LaunchedStep
from basecap.train.wall_time import WallTime

#: Called in every process with the model, the number of steps and the number of tokens so far. It appends its records
#: and returns whether the run ends here, the same value in all processes. An error in one process is raised in all, see
#: `run_interruptible`.
Evaluate = Callable[[LanguageModel, int, int], bool | None]

#: Seconds between checkpoints if the study does not set `train.checkpoint_every`.
CHECKPOINT_SECONDS = 600.0


class Step(NamedTuple):
    """Result of a step: its loss, the next batch, and whether any process asks to stop or to write a checkpoint."""

    loss: float
    following: Batch
    stop: bool
    save: bool


class Trainer:
    """Trains one model on its data and writes its records."""

    def __init__(
        self,
        model: LanguageModel,
        config: TrainConfig,
        seed: int,
        *,
        workload: Workload,
        records: RunRecords,
        placement: DevicePlacement,
        wall: WallTime | None = None,
        traced: Callable[[int], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        """Move an initialised model to the device; raises ConfigError for batch sizes that are not divisible.

        `wall` is the clock that the time of the run's parts is added to, `traced` is entered for each step.
        """
        self.model = model.to(placement.device)
        self.wall = wall or WallTime()
        self.traced = traced
        self.config = config
        self.seed = seed
        self.workload = workload
        self.records = records
        self.placement = placement
        self.trunk = Timetable(config, workload.length)
        self.timetable: Timetable | Branch = self.trunk
        self.micro_batch = config.forward_batch(placement.processes.world)
        self.layout = lay_out(self.model, config, placement.processes)
        self.optimiser = build_optimiser(model, model.recipe(), config)
        self.average = None if config.average is None else WeightAverage(model, config.average, self.layout.local)
        launched = LaunchedStep(self.model, self.optimiser, config, self.layout, placement)
        self.graphs = graphed(launched, config, placement)
        self.step = self.graphs or launched
        self._auxiliary = [f"{name}_loss" for name in model.auxiliary_losses]
        self._saved_step, self._saved_time = 0, time.monotonic()
        self._moved = ""
        self._log: Callable[[str], None] = lambda words: None
        self._advance: Callable[..., None] = lambda amount, note="": None
        self._compiling: contextlib.AbstractContextManager[object] | None = None
        self._stepped = False
        self._pauses = Pauses()

    def note(self, words: str) -> None:
        """Show a note beside the progress until the next step, such as the current evaluation."""
        self._advance(0, note=words)

    def run(
        self,
        label: str,
        evaluate: Evaluate,
        log: Callable[[str], None] = lambda line: None,
        compiling: contextlib.AbstractContextManager[object] | None = None,
    ) -> int | None:
        """Train to the end, from the newest intact checkpoint if there is one.

        Returns:
            The step at which an evaluation ended the run early, None if none did.

        Args:
            label: name of the run in progress and messages.
            evaluate: see `Evaluate`.
            log: called with messages, such as the step at which the run resumes.
            compiling: entered for the first step of this process, if that compiles the model.

        Raises:
            Interrupted: a signal asked a process to stop; a checkpoint was written.
            LostDirectory: the study's directory was moved, and a checkpoint was written there, or it is gone.
            TrainingError: the loss is not finite, or with several processes evaluating, reading or writing failed in
                one of them. All processes raise it; other errors may occur in one process only.
            CheckpointError, DataError: files cannot be read or written (with one process).
        """
        timetable = self.trunk
        self._log = lambda words: log(f"{label}: {words}")
        if self.graphs is not None:
            self.graphs.log = self._log
        with self.wall.part("start"):
            done = self._resume(self._log)
        self._pauses = Pauses(sum(step > done for step in timetable.points) + len(timetable.branches))
        self._compiling = compiling
        total = timetable.trained_steps * timetable.step_tokens * self.placement.processes.is_leader
        with self._abandoning(), progress(label, total=total, unit="tokens", pauses=self._pauses) as advance:
            advance(done * timetable.step_tokens)
            self._advance = advance
            with self.following(label, done):
                if done and self._evaluate(label, evaluate, done, again=True):
                    return done
            for branch in timetable.branches:
                done, ended = self._train(label, evaluate, done, branch.start)
                if ended:
                    return done
                self._train_branch(label, evaluate, branch, done, log)
            done, ended = self._train(label, evaluate, done, timetable.steps)
        return done if ended else None

    def _train(self, label: str, evaluate: Evaluate, done: int, until: int) -> tuple[int, bool]:
        """Train from `done` to `until` steps; return the steps done and whether an evaluation ended the run there."""
        batch = self._batch(done)
        while done < until:
            compiling, self._compiling = self._compiling, None
            part = "steps" if self._stepped else "start"
            if not self._stepped:
                self.note("first step, which may compile")
            with self.wall.part(part), self.traced(done + 1), compiling or contextlib.nullcontext():
                step = self._step(done, batch)
            self._stepped = True
            done, batch = done + 1, step.following
            loss = f"loss {step.loss:.3f}"
            self._advance(self.timetable.step_tokens, note=loss)
            with self.following(label, done):
                if step.stop:
                    self._stop(label, done)
                if step.save or self.timetable.saves(done):
                    self._save(done)
                if self._evaluate(label, evaluate, done):
                    return done, True
            self.note(loss)
        with self.following(label, done):
            self._settle()
        return done, False

    def _train_branch(
        self, label: str, evaluate: Evaluate, branch: Branch, done: int, log: Callable[[str], None]
    ) -> None:
        """Train a branch to its end unless it is finished, then restore the trunk from its checkpoint at `done`."""
        group, trunk, records = self.placement.processes, self.records, branch_of(self.records, branch.tokens)
        name = f"{label}, branch of {branch.tokens} tokens"
        length, tokens = branch.steps - branch.start, branch.step_tokens
        if group.run_on_leader(lambda: records.finished):
            self._advance(length * tokens)
            return
        if done > branch.start:
            raise CheckpointError(
                f"{trunk.path} has trained {done} steps, and the branch of {branch.tokens} tokens begins after "
                f"{branch.start}; remove that branch, or give another --out."
            )
        with self.following(label, done):
            self._save(done)
            self._settle()
        group.run_on_leader(lambda: start_branch(records, branch.tokens, branch.start * tokens))
        self.records, self.timetable = records, branch
        try:
            at = self._resume(lambda words: log(f"{name}: {words}")) or done
            self._advance((at - done) * tokens)
            with self.following(name, at):
                if at > done:
                    self._evaluate(name, evaluate, at, again=True)
            self._train(name, evaluate, at, branch.steps)
        finally:
            self.records, self.timetable = trunk, self.trunk
        group.run_on_leader(lambda: finish_branch(records))
        path = checkpoint.stored(trunk.resume)[done]
        group.run_on_all(lambda: self._restore(path))
        self._saved_step = done

    def _evaluate(self, label: str, evaluate: Evaluate, done: int, *, again: bool = False) -> bool:
        """Evaluate if that is due and return whether the run ends here; raises Interrupted in all processes.

        `again`, where a run resumes, much may have been measured before, so it says little of the time of the others.
        """
        if not self.timetable.evaluates(done):
            return False
        with self._pauses.pause(counted=not again), self.wall.part("evaluations"):
            ended = self._measure(evaluate, done)
        if ended is None:
            self._stop(label, done)
        if ended:
            self._save(done)
            self._settle()
        return ended

    def _measure(self, evaluate: Evaluate, done: int) -> bool | None:
        """Store weights if due and evaluate; return whether the run ends here, None if a signal interrupted it."""
        group, keeps = self.placement.processes, self.timetable.keeps(done)
        self.model.eval()
        try:
            # no signal raises while weights are swapped or written
            with self.average.applied() if self.average else contextlib.nullcontext():
                model = self.layout.whole()
                if keeps:
                    self.layout.keep(self.records, model, done)
                with immediate() if group.world == 1 else contextlib.nullcontext():
                    ended = bool(evaluate(model, done, done * self.timetable.step_tokens))
                if ended and not keeps:
                    self.layout.keep(self.records, model, done)
                return ended
        except Interrupted:
            return None
        finally:
            self.model.train()

    def _stop(self, label: str, done: int) -> NoReturn:
        left = self._follow()
        with contextlib.suppress(CheckpointError) if left else contextlib.nullcontext():
            self._settle()
        if left:  # the checkpoint may have been on its way to where the directory was
            self._saved_step = -1
        self._save(done)
        self._settle()
        message = f"{label}: stopped at step {done} of {self.timetable.steps} with a checkpoint"
        if left:
            raise LostDirectory(f"{message}, as {self._moved}.")
        message = f"{message}; run the same command again to resume." if self.placement.processes.is_leader else ""
        raise Interrupted(requested() or signal.SIGTERM, message)

    @contextlib.contextmanager
    def following(self, label: str, done: int) -> Iterator[None]:
        """Raise LostDirectory after a block, or its error, if the study's directory moved; a checkpoint is written."""
        alone = self.placement.processes.world == 1
        try:
            yield
        except Exception:
            if not (alone and self._follow()):
                raise
        if alone and self._follow():
            self._stop(label, done)

    def _follow(self) -> bool:
        """Whether the study's directory was moved, where records go on then; raises LostDirectory when it is gone."""
        if not self._moved and self.records.left:
            self.records, self._moved = self.records.followed()
        return bool(self._moved)

    def _save(self, done: int) -> None:
        """Write the checkpoint after `done` steps unless it exists."""
        if self._saved_step != done:
            with self.wall.part("checkpoints"):
                self.layout.save(self.records, self.optimiser, done, self.average)
            self._saved_step, self._saved_time = done, time.monotonic()

    def _settle(self) -> None:
        """Wait until the last checkpoint and kept weights are on the disk."""
        with self.wall.part("checkpoints"):
            self.layout.settle()

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Where the block ends with an error, wait for what is being written, and log why it cannot be."""
        try:
            yield
        except BaseException:
            unwritten = self.layout.abandon()
            if unwritten is not None:
                self._log(str(unwritten))
            raise

    def _resume(self, log: Callable[[str], None]) -> int:
        group = self.placement.processes
        path = group.run_on_all(lambda: checkpoint.intact(self.records.resume, log) if group.is_leader else None)[0]
        done = group.run_on_all(lambda: self._restore(path))[group.rank]
        group.run_on_leader(lambda: self.records.rewind(done))
        if done and group.is_leader:
            log(f"resumed at step {done} of {self.timetable.steps}.")
        self._saved_step = done
        return done

    def _restore(self, path: Path | None) -> int:
        if path is None:
            return 0
        self.step.forget()
        return self.layout.restore(path, self.optimiser, self.average)

    def _batch(self, step: int) -> Batch:
        group = self.placement.processes
        return self.workload.batch(self.seed, step, self.config.batch, rank=group.rank, world=group.world)

    def _split(self, batch: Batch) -> Iterator[Batch]:
        """Yield the micro-batches, which have proportionally more rows if the sequences are short."""
        share = self.config.batch // self.placement.processes.world
        return batch.split(self.micro_batch * len(batch) // share)

    def _step(self, step: int, batch: Batch) -> Step:
        """Run one update; the next batch is read while the device computes."""
        start, group = time.perf_counter(), self.placement.processes
        rate = self.timetable.rate(step)
        set_learning_rate(self.optimiser, rate)
        losses, norm = self._gradients(batch)
        following = batch if self._follow() else self._batch(step + 1)
        ends = self._follow() or requested() is not None
        old = self.config.checkpoint_every is None and time.monotonic() - self._saved_time >= CHECKPOINT_SECONDS
        save = (old and group.is_leader) or self.layout.failed
        asked = torch.tensor([ends, save], dtype=losses.dtype, device=losses.device)
        shared = group.mean(torch.cat([losses, asked]))
        mean_loss, *auxiliary, stop, saves, grad_norm = torch.cat([shared, norm[None]]).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            self._refuse(step, batch, "loss" if not math.isfinite(mean_loss) else "gradients")
        self.step.update()
        if self.average is not None:
            self.average.update(step + 1)
        if group.is_leader:
            seconds = time.perf_counter() - start
            self._record(
                {
                    "step": step + 1,
                    "tokens": (step + 1) * self.timetable.step_tokens,
                    "train_loss": mean_loss,
                    **dict(zip(self._auxiliary, auxiliary, strict=True)),
                    "lr": rate,
                    "grad_norm": grad_norm,
                    "tokens_per_s": self.timetable.step_tokens / seconds,
                    "seconds": seconds,
                }
            )
        return Step(mean_loss, following, stop > 0, saves > 0)

    def _record(self, row: dict[str, float]) -> None:
        """Append a step to the metrics, also where the study's directory moves at this moment."""
        try:
            self.records.append_metrics(row)
        except (DataError, LostDirectory):
            if not self._follow():
                raise
            self.records.append_metrics(row)

    def _gradients(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute clipped gradients over the micro-batches; return the contribution to the losses, and the norm.

        The mean of the contributions over the processes, like that of the gradients, is the mean over all targets of
        the step, regardless of their distribution over rows, micro-batches and processes.
        """
        group, device = self.placement.processes, self.placement.device
        counts = [part.predicted for part in self._split(batch)]
        share = group.mean(torch.full((), sum(counts), dtype=torch.float64, device=device)).clamp(min=1 / group.world)
        shares = [(count / share).float() for count in counts]
        return self.step.gradients(list(self._split(batch.to(device))), shares)

    def _refuse(self, step: int, batch: Batch, what: Literal["loss", "gradients"]) -> None:
        """Raise TrainingError in all processes; it names the first bad parameter or module of any of them."""
        model = self.layout.whole()
        found = self.placement.processes.run_on_all(lambda: self._first_bad(model, batch))
        raise TrainingError(describe_fault(what, step + 1, found))

    def _first_bad(self, model: LanguageModel, batch: Batch) -> str | None:
        """Return the first bad parameter or module for the sequences of this process, None if there is none."""
        for part in self._split(batch.to(self.placement.device)):
            with self.placement.autocast():
                where = first_bad_module(model, *part.parts)
            if where is not None:
                return where
        return None

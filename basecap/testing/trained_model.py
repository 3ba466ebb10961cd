"""The leak test of a trained model: real held-out windows, in its own precision, through the code of the evaluation.

A proof before training cannot know what training amplifies. Here the numbers that a verdict depends on are tested
themselves: what follows a cut is replaced, and no loss before it may move.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from basecap.errors import describe_error
from basecap.evals import Context, token_losses
from basecap.evals.domain_loss import DomainLoss
from basecap.mixers import generator_for, make_generic
from basecap.models.language_model import LanguageModel
from basecap.testing._harness import root_mean_square
from basecap.testing.claims import ALL, PERSISTENT, PERTURBATION
from basecap.testing.fresh_process import (
    Batch,
    FreshProcess,
    NotRunError,
    Question,
    StoredModel,
    draws_of,
    lack_of_memory,
)
from basecap.testing.subject import OutOfTimeError, undisturbed

#: Change of a loss in nats that is rounding, in float32 and in bf16: a Fourier transform spreads it over all positions,
#: and another batch size adds up in another order. A larger one is a leak if it persists, see `basecap.testing.claims`.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
#: The same where a batch of one shape is read by two processes on a CPU: they round alike.
EQUAL = 1e-5
#: Seconds that the leak test of one model may take.
BUDGET = 120.0
#: Most tokens of a batch in a new process, and for an architecture that is built in, whose mixers the test suite proves
#: too.
FEW_TOKENS = 2048
#: Passes with later tokens replaced, each with cuts of its own in every row; more where the model draws random numbers,
#: each with other ones.
PASSES, DRAWS = 2, 16


@dataclass(frozen=True, kw_only=True)
class LeakTest:
    """What a leak test found.

    Attributes:
        leaks: what is wrong, as the end of a sentence that begins with the name of the run; "" if nothing is.
        raised: whether the test raised, so that it says nothing of leaks.
        moved: the largest change of a loss that must not change, in nats.
        shapes: rows and tokens of the batches.
        fresh_process: whether a new process gave the same losses.
        untested: what was not tested, and why.
        seconds: what it took.
    """

    leaks: str = ""
    raised: bool = False
    moved: float = 0.0
    shapes: list[list[int]] = field(default_factory=list)
    fresh_process: bool = False
    untested: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return what run.json keeps."""
        return asdict(self)


class LeakError(Exception):
    """A loss has changed that must not."""


@dataclass
class _Found:
    """What a leak test has found so far, as in `LeakTest`."""

    leaks: str = ""
    raised: bool = False
    shapes: list[list[int]] = field(default_factory=list)
    fresh_process: bool = False
    untested: list[str] = field(default_factory=list)

    def unless_late(self, name: str, test: Callable[[], None]) -> bool:
        """Run a part of the test and return whether it ran; note why it did not."""
        try:
            test()
        except OutOfTimeError:
            self.untested.append(f"{name}: the {BUDGET:.0f} s of the test are over")
        except NotRunError as error:
            self.untested.append(f"{name}: {error}")
        else:
            return True
        return False


@torch.no_grad()
def find_leaks(
    model: LanguageModel,
    evaluation: DomainLoss,
    context: Context[Any],
    seed: int,
    *,
    whole: bool,
    elsewhere: tuple[FreshProcess, StoredModel] | None = None,
) -> LeakTest:
    """Test whether losses on held-out windows depend on anything but earlier tokens of their window.

    In batches of every length that the model reads, what follows a random cut in each row is replaced, inputs and
    targets; no loss before the cut may change, nor any activation with the targets alone. The last batch, which comes
    after the others, must have the same losses when a fresh copy of the weights reads it first, and its first row when
    it is alone; few rows of the first and the last one must have them in a new process too. Equal shapes give equal
    bits on a CPU; differences up to `ROUNDING`, or twice that of two equal passes, are allowed. What does not fit into
    `BUDGET` is not tested. A compiled model is tested by the code that evaluates it, except in a new process.

    Args:
        model: in evaluation mode, on the context's device.
        evaluation: chooses windows and batches.
        context: of the evaluation.
        seed: of cuts and tokens.
        whole: whether every batch shape of the evaluation is tested, not only few rows of every length.
        elsewhere: a new process and the weights of the model for it; None: there is none. It computes its losses while
            this process tests, where the memory of the device has room for both.
    """
    started = time.monotonic()
    tester = _Tester(model, context, seed, evaluation.config.tokens_per_batch, started + BUDGET)
    found = _Found()
    try:
        batches = _batches(evaluation, context, model, whole)
        question = None if elsewhere is None else tester.question(elsewhere[1], batches)
        if elsewhere is not None and question is not None and lack_of_memory(question) is None:
            elsewhere[0].ask([question], tester.left())
        for inputs, targets in batches:
            rows, length = inputs.shape
            if found.unless_late(f"{rows} x {length} tokens", partial(tester.test, inputs, targets)):
                found.shapes.append([rows, length])
        found.unless_late("a fresh copy of the weights", tester.test_fresh)
        if elsewhere is not None and question is not None:
            test = partial(tester.test_process, elsewhere[0], question)
            found.fresh_process = found.unless_late("a new process", test)
    except LeakError as error:
        found.leaks = str(error)
    except (Exception, SystemExit) as error:  # whatever a plugin's code raises
        found.raised = True
        found.leaks = f"cannot be tested for leaks ({describe_error(error)})"
    moved, seconds = max(tester.moved, default=0.0), round(time.monotonic() - started, 3)
    return LeakTest(**vars(found), moved=moved, seconds=seconds)


def find_leaks_untrained(model: LanguageModel, evaluation: DomainLoss, context: Context[Any], seed: int) -> LeakTest:
    """Test a model with random parameters, which this function sets: real text through its own embedding."""
    make_generic(model)
    return find_leaks(model, evaluation, context, seed, whole=True)


def _batches(evaluation: DomainLoss, context: Context[Any], model: LanguageModel, whole: bool) -> list[Batch]:
    """Return inputs and targets [B, T], shorter windows first, larger batches last.

    These are few rows of each length or, if `whole`, a batch of each shape, and few rows of each domain beside it.
    """
    found: list[Batch] = []
    seen = set()
    for inputs, targets in evaluation.batches(model, context.data):
        new = (inputs.shape if whole else inputs.shape[1]) not in seen
        seen.add(inputs.shape if whole else inputs.shape[1])
        rows = len(inputs) if whole and new else max(1, FEW_TOKENS // inputs.shape[1])
        if whole or new:
            found.append((inputs[:rows], targets[:rows]))
    return sorted(found, key=lambda batch: (batch[0].shape[1], batch[0].shape[0]))


def _few(batch: Batch) -> Batch:
    """Return the first rows of a batch."""
    inputs, targets = batch
    rows = max(1, FEW_TOKENS // inputs.shape[1])
    return inputs[:rows], targets[:rows]


class _Tester:
    """Compares passes of a model over a batch; `moved` are the changes of losses that were found."""

    def __init__(self, model: LanguageModel, context: Context[Any], seed: int, tokens_per_pass: int, deadline: float):
        self.model, self.context, self.seed, self.deadline = model, context, seed, deadline
        self.tokens_per_pass = tokens_per_pass
        self.moved: list[float] = []
        self._draws = 0
        self._draws_numbers = False
        self._fresh: LanguageModel | None = None
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def test(self, inputs: Tensor, targets: Tensor) -> None:
        """Raise LeakError when losses of a batch depend on later tokens, or activations on targets."""
        losses, hidden = self._pass(self.model, inputs, targets)
        again, hidden_again = self._pass(self.model, inputs, targets)
        rounding = self._rounding(hidden)
        noise = self._change(again, losses, torch.ones_like(targets, dtype=torch.bool))
        if noise > (rounding if self.context.device.type == "cpu" else 10 * rounding):
            raise LeakError(
                f"gives two losses for one window, which differ by {noise:.2g} nats: it keeps state from one pass to "
                "the next, or draws random numbers of its own"
            )
        allowed = max(rounding, 2 * noise)
        for number in range(PASSES):
            self._test_future(inputs, targets, losses, allowed, f"{tuple(inputs.shape)} {number}")
        size = root_mean_square(hidden)
        wobble = (hidden_again - hidden).abs().max().item() / size
        other = torch.where(targets < 0, targets, self._drawn(inputs, targets, "targets"))
        _, felt = self._pass(self.model, inputs, other)
        if (felt - hidden).abs().max().item() / size > max(rounding, 2 * wobble):
            raise LeakError("reads the targets: activations change with them")
        self._last = inputs, targets, again
        if self._draws_numbers:
            self._test_draws(_few((inputs, targets)), allowed)

    def _test_draws(self, few: Batch, allowed: float) -> None:
        """Test again with other random numbers, which may decide whether the model looks ahead."""
        for self._draws in range(1, DRAWS + 1):
            losses, _ = self._pass(self.model, *few)
            self._test_future(*few, losses, allowed, f"{tuple(few[0].shape)} draws {self._draws}")
        self._draws = 0

    def test_fresh(self) -> None:
        """Raise LeakError when a fresh copy of the weights gives other losses, or a row does when it is alone."""
        if self._last is None:
            return
        inputs, targets, losses = self._last
        everywhere = torch.ones_like(targets, dtype=torch.bool)
        self._fresh = fresh = self._fresh_copy()
        first, hidden = self._pass(fresh, inputs, targets)
        rounding = self._rounding(hidden)
        if self._change(first, losses, everywhere) > rounding:
            raise LeakError("carries state from batch to batch: a fresh copy of its weights gives other losses")
        alone, _ = self._pass(fresh, inputs[:1], targets[:1])
        self._draws = 1
        chance, _ = self._pass(fresh, inputs, targets)
        self._draws = 0
        noise = (chance - losses)[:1].abs().mean().item()  # of a model that draws random numbers
        mean = (alone - losses[:1]).abs().mean().item()
        if mean > max(rounding, 2 * noise):
            raise LeakError(f"mixes the windows of a batch: alone, one has losses that differ by {mean:.2g} nats")
        if fresh.compiled:  # single losses differ by rounding
            fresh.compiled = False
            plain, _ = self._pass(fresh, inputs, targets)
            mean = abs((plain - losses).sum().item()) / max(1, int((targets >= 0).sum()))
            if mean > max(rounding, 2 * noise):
                raise LeakError(f"has another mean loss in compiled code, by {mean:.2g} nats")

    def question(self, stored: StoredModel, batches: Sequence[Batch]) -> Question:
        """Return what a new process computes: few rows of the first batch and of the last one."""
        return Question(
            model=stored,
            device=str(self.context.device),
            bf16=self._narrow(),
            threads=torch.get_num_threads(),
            draws=draws_of(self.context.device),
            batches=[_few(batch) for batch in (*batches[:-1][:1], *batches[-1:])],
        )

    def test_process(self, process: FreshProcess, question: Question) -> None:
        """Raise LeakError when a new process, which has read nothing yet, gives other losses than the fresh copy."""
        if self._fresh is None:
            raise NotRunError("the fresh copy of the weights was not tested")
        if self.left() < 0:
            raise OutOfTimeError
        if not process.asked:  # there was no room beside this process
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()
            if lack := lack_of_memory(question):
                raise NotRunError(f"it needs {lack}")
            process.ask([question], self.left())
        (answers,) = process.answers()
        for (inputs, targets), answer in zip(question.batches, answers, strict=True):
            here, hidden = self._pass(self._fresh, inputs, targets)
            again, _ = self._pass(self._fresh, inputs, targets)
            everywhere = torch.ones_like(targets, dtype=torch.bool)
            least = EQUAL if self.context.device.type == "cpu" else self._rounding(hidden)
            moved = self._change(answer.to(here), here, everywhere)
            if moved > max(least, 2 * self._change(again, here, everywhere)):
                raise LeakError(
                    "carries state outside the model: in a new process, with the same weights, losses of the same "
                    f"windows differ by {moved:.2g} nats"
                )

    def left(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()

    def _test_future(self, inputs: Tensor, targets: Tensor, losses: Tensor, allowed: float, name: str) -> None:
        given = inputs, targets
        sizes = (targets >= 0).sum(1)
        share = torch.rand(len(inputs), generator=generator_for(self.seed, f"cuts {name}"), dtype=torch.float64)
        cuts = 1 + (share * (sizes - 1).clamp(min=0)).long()
        later = torch.arange(inputs.shape[1]) >= cuts[:, None]
        inputs = torch.where(later, self._drawn(inputs, targets, f"inputs {name}"), inputs)
        replaced = torch.where(later & (targets >= 0), self._drawn(inputs, targets, f"targets {name}"), targets)
        changed = inputs, replaced
        found, _ = self._pass(self.model, *changed)
        before = ~later.to(found.device)
        moved = (found - losses).where(before, 0.0)
        if self._change(found, losses, before) > allowed and self._persists(given, changed, before, moved, allowed):
            row, position = (moved.abs() == moved.abs().max()).nonzero()[0].tolist()
            raise LeakError(
                f"sees the future in held-out text: of {tuple(inputs.shape)} tokens, the loss at position "
                f"{position} changes by {moved.abs().max().item():.2g} nats with tokens from position "
                f"{cuts[row].item()} on"
            )

    def _persists(self, given: Batch, changed: Batch, before: Tensor, moved: Tensor, allowed: float) -> bool:
        """Whether changes of losses are a leak and not rounding, which differs when all embeddings change a little."""
        changes = []
        for number in range(ALL):
            drawn = torch.randn(self.model.config.hidden, generator=generator_for(self.seed, f"factor {number}"))
            factor = (1 + PERTURBATION * drawn.sign()).to(self.context.device)
            losses, found = (self._pass(self.model, *batch, factor=factor)[0] for batch in (given, changed))
            changes.append((found - losses).where(before, 0.0))
        every = torch.stack(changes)
        mean = every.mean(0)
        scatter = (every.square().mean(0) - mean.square()).clamp(min=0)
        stays = (mean.abs() > allowed) & (mean.square() > PERSISTENT**2 * scatter)
        # A leak that needs the exact embeddings is much larger without the perturbation.
        return bool(stays.any()) or moved.abs().max().item() > PERSISTENT * every.abs().max().item()

    def _pass(
        self,
        model: LanguageModel,
        inputs: Tensor,
        targets: Tensor,
        factor: Tensor | None = None,
    ) -> Batch:
        """Return losses, float64 [B, T], and the final activations [B, T, D].

        Args:
            model: what is tested.
            inputs: int64 [B, T].
            targets: int64 [B, T].
            factor: multiplies the embeddings, [D].

        Raises:
            OutOfTimeError: the deadline has passed.
        """
        if self.left() < 0:
            raise OutOfTimeError
        kept: list[Tensor] = []
        handle = model.norm.register_forward_hook(lambda module, given, output: kept.append(output))
        scaled = model.embedding.register_forward_hook(
            lambda module, given, output: None if factor is None else output * factor
        )
        try:
            with undisturbed(self.context.device):
                # Random numbers are the same in all passes with as many draws before them.
                torch.rand(self._draws, device=self.context.device)
                before = draws_of(self.context.device)
                losses = token_losses(model, self.context, inputs, targets, self.tokens_per_pass)
                after = draws_of(self.context.device)
                self._draws_numbers |= not all(map(torch.equal, before, after))
        finally:
            handle.remove()
            scaled.remove()
        return losses, torch.cat(kept)

    def _change(self, found: Tensor, losses: Tensor, where: Tensor) -> float:
        change = (found - losses).abs().where(where.to(found.device), 0.0).max().item()
        self.moved.append(change)
        if not change < float("inf"):
            raise ArithmeticError("its losses are not finite")
        return change

    def _drawn(self, inputs: Tensor, targets: Tensor, name: str) -> Tensor:
        """Return tokens [B, T], int64, each drawn from those of the batch."""
        tokens = inputs[targets >= 0]
        return tokens[torch.randint(len(tokens), inputs.shape, generator=generator_for(self.seed, name))]

    def _rounding(self, hidden: Tensor) -> float:
        return ROUNDING[torch.bfloat16 if hidden.dtype == torch.bfloat16 or self._narrow() else torch.float32]

    def _narrow(self) -> bool:
        with self.context.autocast():
            return torch.is_autocast_enabled(self.context.device.type)

    def _fresh_copy(self) -> LanguageModel:
        """Return a new model with the same parameters, and with the buffers that passes do not change."""
        with undisturbed(self.context.device):  # building a model draws random numbers
            fresh = LanguageModel(self.model.config).to(self.context.device)
        now = dict(self.model.named_buffers())
        for name, parameter in self.model.named_parameters():
            fresh.get_parameter(name).copy_(parameter)
        for name, buffer in fresh.named_buffers():
            before = self._buffers.get(name)
            if before is not None and before.shape == buffer.shape and torch.equal(before, now[name]):
                buffer.copy_(before)
        if self.model.compiled:
            fresh.compile_training(anew=False)
        return fresh.eval()

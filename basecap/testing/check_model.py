"""The test for leaks that `basecap run` runs before training: a model that sees the future would win every comparison.

The model has the width and options of the study, few layers and random parameters. The test is that of `basecap
check` at larger sizes and with another tolerance: a mixer that computes in single precision internally trains in that
way, so it must not be refused.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.mixers import ARCHITECTURES, generator_for
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel, outline
from basecap.ops import recorded
from basecap.testing._causality import Probe, choose_cuts, future, packed, runs
from basecap.testing._harness import make_generic, roundoff
from basecap.testing._narrowing import Watch

#: The longest test sequence in float64; the studies train on 2,048 tokens, and most blocks are shorter.
LONGEST = 4096
#: Shorter sequences, for models that do not fit into memory or cannot be computed at that length.
SHORTER = (1024, 128)
#: Lengths of the sequences that are cut at every position, for leaks between neighbours at the edges of chunks: longer
#: than those of 128 tokens, with a part of one at the end; then for models that want whole ones.
NEAR = (136, 128)
#: Vocabulary size, small because activations replace the embeddings.
VOCAB = 64
#: Most sequences in a pass in the precision of training.
FEW_ROWS = 3

#: Smallest change of an output that counts as a leak, relative to the root mean square of all outputs. float32, the
#: most precise dtype of training, rounds by 6e-8: a sixtieth of that is lost when it is added to the activations,
#: before training could amplify it.
LEAK = 1e-9
#: Rounding errors above LEAK (a convolution by Fourier transforms spreads them over all positions) are distinguished
#: from leaks by repeating the measurement with all numbers changed by this share, two roundings of bf16: rounding
#: errors change, a leak stays.
PERTURBATION = 2.0**-8
#: Number of measurements before suspicious positions are selected, and before the decision.
FEW, ALL = 4, 16
#: Mean change of a position over its standard deviation from which it counts as persistent. For rounding it is about
#: 0.5, with few measurements occasionally ten; for a leak it is in the hundreds.
PERSISTENT = 4.0
#: Smallest persistent change that counts as a leak in a mixer that computes in float32: 8 of its roundings, because the
#: tables of Fourier transforms are rounded in the same way each time.
NARROW_LEAK = 8 * roundoff(torch.float32)
#: Share of the outputs above which two outputs for one input differ by randomness rather than rounding.
RANDOM = 0.1

#: What a model with a leak does.
ROWS, FUTURE = "mixes the sequences of a batch", "sees the future"
PACKED = "mixes packed documents or sees the future in them"

Autocast = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a study computes on its device: what its training passes run in, and how many sequences one holds."""

    autocast: Autocast
    bf16: bool
    rows: int


@dataclass(frozen=True, kw_only=True)
class ProofSetting:
    """The length and precision of one proof of a model.

    Attributes:
        length: tokens per sequence.
        dtype: of parameters and inputs.
        words: the precision, for messages.
        autocast: context of every pass.
        rows: most sequences in a pass, and most places to look at.
        everywhere: look at every position, in as many passes as that takes.
    """

    length: int
    dtype: torch.dtype
    words: str
    autocast: Autocast = contextlib.nullcontext
    rows: int = 8
    everywhere: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One property to prove.

    Attributes:
        probe: two inputs.
        measure: how the probe is measured.
        fault: what the model does if the measure is not zero.
        broken: how that shows, for each row.
        mode: the mode of the model, if the property is proved in the other mode too.
    """

    probe: Probe
    measure: Callable[[Probe], tuple[Tensor, float]]
    fault: str
    broken: Sequence[str]
    mode: str = ""


class Fault(NamedTuple):
    """What is wrong with a model, how that shows, and the mode of the claim."""

    what: str
    how: str
    mode: str = ""


def find_leak(config: ModelConfig, device: torch.device, training: Precision) -> str | None:
    """Return what leaks in a model, as the end of a sentence that begins with its name; None if nothing does.

    In evaluation and in training mode, no sequence may change the outputs of another, later inputs must not change
    earlier outputs, and earlier outputs must have no gradients with respect to them; the same holds between packed
    documents, both ways, and within them. A model that raises in every setting, such as one whose mixer takes no
    segments, cannot leak there; training reports the error.

    Args:
        config: of the model; its length, width and options are kept, its depth and vocabulary are not.
        device: where it will be trained.
        training: how it will be trained; the proof runs in float64 first, or in float32 if float64 raises.
    """
    own = ProofSetting(
        length=config.max_length,
        dtype=torch.float32,
        words="bf16" if training.bf16 else "fp32",
        autocast=training.autocast,
        rows=min(training.rows, FEW_ROWS),
    )
    near_lengths = list(dict.fromkeys(min(config.max_length, length) for length in NEAR))
    wide, near = (
        [
            ProofSetting(length=length, dtype=dtype, words=str(dtype).removeprefix("torch."), everywhere=everywhere)
            for length in lengths
            for dtype in (torch.float64, torch.float32)  # a kernel may not support double precision
        ]
        for lengths, everywhere in ((_lengths(config.max_length), False), (near_lengths, True))
    )
    every = (_evaluation, _training, _packed, _packed_gradients)
    for settings, proofs in ((wide, every), (near, (_evaluation, _packed)), ([own], every)):
        for claims in proofs:
            found = _first_that_runs(partial(_fault, config, device, claims), settings)
            if found is None:
                continue
            other = partial(_fault, config, device, _training)
            alone = found.mode == "training" or (found.mode and _first_that_runs(other, settings) is None)
            return f"{found.what}{f' in {found.mode} mode only' if alone else ''}: {found.how}"
    return None


def _lengths(longest: int) -> list[int]:
    """Return the lengths to try, that of the study too where it is longer: chunks may need it."""
    lengths = [longest] if longest <= LONGEST else [LONGEST, longest]
    return lengths + [length for length in SHORTER if length < longest]


def _first_that_runs(prove: Callable[[ProofSetting], Fault | None], settings: Sequence[ProofSetting]) -> Fault | None:
    for setting in settings:
        with contextlib.suppress(Exception, SystemExit):  # whatever a plugin's code raises
            return prove(setting)
    return None


def _fault(
    config: ModelConfig,
    device: torch.device,
    claims: Callable[["Subject"], Iterator[Claim]],
    setting: ProofSetting,
) -> Fault | None:
    subject = Subject(config, device, setting)
    for claim in claims(subject):
        first, size = claim.measure(claim.probe)
        if not first.isfinite().all():
            raise ArithmeticError("not finite")
        if first.abs().max() > LEAK * size:
            found = _refusal(claim, first, size, subject)
            if found is not None:
                return found
    return None


def _refusal(claim: Claim, first: Tensor, size: float, subject: "Subject") -> Fault | None:
    """Return the fault if `first`, a measurement of the claim, is a leak rather than rounding."""
    with Watch() as watch:
        again, _ = claim.measure(claim.probe)
    if (again - first).abs().max() > RANDOM * size:
        return Fault(
            "gives two outputs for one input",
            "a leak cannot be distinguished from chance; draw random numbers from PyTorch's default generator",
        )
    narrow = subject.setting.dtype != torch.float64 or watch.dtype is not None
    leaks = _leaks(claim, first, (NARROW_LEAK if narrow else LEAK) * size, subject)
    if not leaks.any():
        return None
    row, position = leaks.nonzero()[0].tolist()
    share = first[row].abs().max().item() / size
    setting = subject.setting
    where = f"first at position {position} of {setting.length}, by {share:.1e} of their size, in {setting.words}"
    return Fault(claim.fault, f"{claim.broken[row]} ({where})", claim.mode)


def _leaks(claim: Claim, first: Tensor, least: float, subject: "Subject") -> Tensor:
    """Return the positions, bool [B, T], with a persistent measurement of root mean square `least` or more."""
    total, squares = first.clone(), first.square().mean(-1)
    for number in range(1, ALL):
        names = iter((f"inputs {number}", f"weights {number}"))
        probe = claim.probe.moved(lambda: subject.random(next(names), len(first)).sign(), PERTURBATION)  # noqa: B023
        measured, _ = claim.measure(probe)
        total += measured
        squares += measured.square().mean(-1)
        mean = total.square().mean(-1) / (number + 1) ** 2
        scatter = (squares / (number + 1) - mean).clamp(min=0)
        leaks = (mean > PERSISTENT**2 * scatter) & (mean > least**2)
        if number + 1 == FEW and not leaks.any():
            break
    return leaks


class Subject:
    """A small model in one setting, and the inputs that replace its embeddings."""

    def __init__(self, config: ModelConfig, device: torch.device, setting: ProofSetting):
        self.setting, self.device, self.hidden = setting, device, config.hidden
        config = _shallow(config)
        for generic in (True, False):
            self.model = LanguageModel(config).initialise(0)
            if generic:
                make_generic(self.model)
            self.model.to(device, setting.dtype)
            self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            with torch.no_grad():
                if self(self.random("x", 1), None).isfinite().all():
                    return  # otherwise test the initial parameters
        raise ArithmeticError("not finite")

    def __call__(self, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
        """Return the final activations; random numbers and buffers are the same in each pass."""
        parts = x_BTD.split(self.setting.rows)
        ids = segments.split(self.setting.rows) if segments is not None else [None] * len(parts)
        return torch.cat([self._pass(*part) for part in zip(parts, ids, strict=True)])

    def _pass(self, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        tokens = torch.zeros(x_BTD.shape[:2], dtype=torch.int64, device=self.device)
        handle = self.model.embedding.register_forward_hook(lambda module, inputs, output: x_BTD)
        try:
            with undisturbed(self.device), self.setting.autocast():
                return self.model.hidden(tokens, segments)
        finally:
            handle.remove()

    def random(self, name: str, rows: int) -> Tensor:
        """Return standard normal values [rows, T, D] that depend on `name` only."""
        drawn = torch.randn(rows, self.setting.length, self.hidden, generator=generator_for(0, name))
        return drawn.to(self.device, self.setting.dtype)

    def future(self) -> tuple[Probe, list[int]]:
        """Return the probe of later inputs, and for each row the first position that changes."""
        length, rows = self.setting.length, self.setting.rows
        cuts = list(range(1, length)) if self.setting.everywhere else choose_cuts(length)[:rows]
        return future(*self._inputs(len(cuts)), cuts), cuts

    def packed(self) -> Probe:
        """Return the probe of packed documents: what comes before them, and what follows in them or in others."""
        length = self.setting.length
        if self.setting.everywhere:
            own = runs(length, length // 2)
        else:
            position = torch.arange(length)
            cuts = choose_cuts(length)[: self.setting.rows]
            own = torch.stack([(position >= cut // 2) & (position < cut) for cut in cuts])
        return packed(*self._inputs(len(own)), own.to(self.device))

    def rows(self) -> Probe:
        """Return a probe of sequences; the second must not depend on its neighbours."""
        x, other, weight = self._inputs(min(3, self.setting.rows))
        own = (torch.arange(len(x), device=self.device) == 1)[:, None].expand(x.shape[:2])
        return Probe(x=x, changed=torch.where(own[..., None], x, other), own=own, weight=weight)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, other inputs and weights of the outputs, each [rows, T, D]."""
        return self.random("x", rows), self.random("other", rows), self.random("weight", rows)


def _shallow(config: ModelConfig) -> ModelConfig:
    """Return the model with one layer of each kind, two at least as one may read of another; its own if that fails."""
    patterns = [ARCHITECTURES.get(layer.use).layers for layer in config.layers]
    depth = max(2, math.lcm(len(patterns), *map(len, patterns)))
    # A decoder reads the last position for all others, as its task wants; the layers below it must not.
    whole = config.model_copy(update={"vocab": VOCAB, "readout": "each"})
    small = whole.model_copy(update={"depth": min(depth, config.depth)})
    try:
        outline(small)
    except (Exception, SystemExit):  # whatever a plugin's code raises
        return whole
    return small


def _evaluation(subject: Subject) -> Iterator[Claim]:
    subject.model.eval()
    yield from _outputs(subject, partial(_unrecorded, subject), "evaluation")


def _outputs(subject: Subject, measure: Callable[[Probe], tuple[Tensor, float]], mode: str) -> Iterator[Claim]:
    """Claim that outputs depend neither on other sequences, where a pass has several, nor on later inputs."""
    if subject.setting.rows > 1:
        moves = ["outputs of one change with the inputs of another"] * 2
        yield Claim(probe=subject.rows(), measure=measure, fault=ROWS, broken=moves, mode=mode)
    probe, cuts = subject.future()
    moves = [f"outputs before position {cut} change with later inputs" for cut in cuts]
    yield Claim(probe=probe, measure=measure, fault=FUTURE, broken=moves, mode=mode)


@torch.no_grad()
def _unrecorded(subject: Subject, probe: Probe) -> tuple[Tensor, float]:
    return probe.movement(subject)


def _training(subject: Subject) -> Iterator[Claim]:
    subject.model.train()
    yield from _outputs(subject, lambda probe: probe.movement(subject), "training")
    probe, cuts = subject.future()
    broken = [f"outputs before position {cut} have gradients with respect to later inputs" for cut in cuts]
    yield Claim(probe=probe, measure=lambda p: p.gradient(subject), fault=FUTURE, broken=broken)


def _packed(subject: Subject) -> Iterator[Claim]:
    subject.model.train()
    probe = subject.packed()
    broken = ["outputs of a document change with others, or with its own later inputs"] * len(probe.own)
    yield Claim(probe=probe, measure=lambda p: p.movement(subject), fault=PACKED, broken=broken)


def _packed_gradients(subject: Subject) -> Iterator[Claim]:
    subject.model.train()
    probe = subject.packed()
    feels = "outputs of a document have gradients with respect to others, or to its own later inputs"
    broken = [feels] * len(probe.own)
    yield Claim(probe=probe, measure=lambda p: p.gradient(subject), fault=PACKED, broken=broken)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Make `device` the current one; PyTorch's random generators and the record of ops come out as they went in."""
    cuda = device.type == "cuda"
    with (
        torch.cuda.device(device) if cuda else contextlib.nullcontext(),
        torch.random.fork_rng([device] if cuda else []),
        recorded(),
    ):
        yield

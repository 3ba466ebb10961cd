"""What is proved of a model: that outputs depend on nothing they must not see, and how a leak differs from rounding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.models.config import ModelConfig
from basecap.testing._causality import Probe
from basecap.testing._harness import roundoff
from basecap.testing._narrowing import Watch
from basecap.testing.subject import OutOfTimeError, ProofSetting, Subject

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


#: That of a model with random numbers that the proof cannot repeat.
CHANCE = Fault(
    "gives two outputs for one input",
    "a leak cannot be distinguished from chance; draw random numbers from PyTorch's default generator",
)

#: Makes the claims about a model.
Claims = Callable[[Subject], Iterator[Claim]]


def find_fault(config: ModelConfig, device: torch.device, claims: Claims, setting: ProofSetting) -> Fault | None:
    """Return the first claim that a model breaks in a setting, None where it breaks none; whatever it raises."""
    subject = Subject(config, device, setting)
    for claim in claims(subject):
        first, size = claim.measure(claim.probe)
        if not first.isfinite().all():
            raise ArithmeticError("its outputs are not finite")
        if first.abs().max() > LEAK * size:
            found = _refusal(claim, first, size, subject)
            if found is not None:
                return found
    return None


def _refusal(claim: Claim, first: Tensor, size: float, subject: Subject) -> Fault | None:
    """Return the fault if `first`, a measurement of the claim, is a leak rather than rounding."""
    with Watch() as watch:
        again, _ = claim.measure(claim.probe)
    if (again - first).abs().max() > RANDOM * size:
        return _unrepeatable(claim, subject, 0.0) or CHANCE
    narrow = subject.setting.dtype != torch.float64 or watch.dtype is not None
    leaks = _leaks(claim, first, (NARROW_LEAK if narrow else LEAK) * size, subject)
    if not leaks.any():
        return None
    row, position = leaks.nonzero()[0].tolist()
    share = first[row].abs().max().item() / size
    if (found := _unrepeatable(claim, subject, share / 2)) is not None:
        return found
    setting = subject.setting
    where = f"first at position {position} of {setting.length}, by {share:.1e} of their size, in {setting.words}"
    return Fault(claim.fault, f"{claim.broken[row]} ({where})", claim.mode)


@torch.no_grad()
def _unrepeatable(claim: Claim, subject: Subject, least: float) -> Fault | None:
    """Return the fault of a model whose outputs for one input differ from pass to pass, else None.

    Then they also differ from one input to another, as if one position or sequence changed what another gets. Models
    that were built anew tell what passes leave behind from chance: only chance lets their first passes differ.

    Args:
        claim: that seems broken.
        subject: the model, which has read much.
        least: change over the size of the outputs that counts.
    """
    probe = replace(claim.probe, changed=claim.probe.x, later=None)
    try:
        moved, size = probe.movement(subject.anew())
        change = moved.abs().max().item() / size
        if change <= max(LEAK, least):
            return None
        ours, theirs = (subject.anew()(probe.x, probe.segments).double() for _ in range(2))
    except (OutOfTimeError, torch.OutOfMemoryError):  # what was measured stands
        return None
    if (ours - theirs).abs().max().item() / size > change / 2:
        return CHANCE
    return Fault(
        "keeps state from one pass to the next",
        f"outputs for the same input change when it is read again (by {change:.1e} of their size, in "
        f"{subject.setting.words}); keep nothing of a forward pass on the module or outside it",
    )


def _leaks(claim: Claim, first: Tensor, least: float, subject: Subject) -> Tensor:
    """Return the positions, bool [B, T], with a persistent measurement of root mean square `least` or more."""
    total, squares = first.clone(), first.square().mean(-1)
    for number in range(1, ALL):
        names = iter((f"inputs {number}", f"weights {number}"))
        probe = claim.probe.moved(lambda: subject.signs(next(names), len(first)), PERTURBATION)  # noqa: B023
        measured, _ = claim.measure(probe)
        total += measured
        squares += measured.square().mean(-1)
        mean = total.square().mean(-1) / (number + 1) ** 2
        scatter = (squares / (number + 1) - mean).clamp(min=0)
        leaks = (mean > PERSISTENT**2 * scatter) & (mean > least**2)
        if number + 1 == FEW and not leaks.any():
            break
    return leaks


def evaluation(subject: Subject) -> Iterator[Claim]:
    """Claim that outputs depend on nothing they must not see in evaluation mode."""
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


def training(subject: Subject) -> Iterator[Claim]:
    """Claim the same in training mode, of outputs and of their gradients."""
    subject.model.train()
    yield from _outputs(subject, lambda probe: probe.movement(subject), "training")
    probe, cuts = subject.future(subject.setting.rows)  # of one pass: its graph needs memory
    broken = [f"outputs before position {cut} have gradients with respect to later inputs" for cut in cuts]
    yield Claim(probe=probe, measure=lambda p: p.gradient(subject), fault=FUTURE, broken=broken)


def packed(subject: Subject) -> Iterator[Claim]:
    """Claim that outputs of a packed document depend on nothing that follows them, nor on other documents."""
    subject.model.train()
    probe = subject.packed()
    broken = ["outputs of a document change with others, or with its own later inputs"] * len(probe.own)
    yield Claim(probe=probe, measure=lambda p: p.movement(subject), fault=PACKED, broken=broken)


def packed_gradients(subject: Subject) -> Iterator[Claim]:
    """Claim that their gradients do not either."""
    subject.model.train()
    probe = subject.packed()
    feels = "outputs of a document have gradients with respect to others, or to its own later inputs"
    broken = [feels] * len(probe.own)
    yield Claim(probe=probe, measure=lambda p: p.gradient(subject), fault=PACKED, broken=broken)

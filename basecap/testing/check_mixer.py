"""The conformance suite: the checks that every sequence mixer must pass before it is trained.

`_harness.py` defines the only tolerance, which is for rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerChoice
from basecap.names import split_backbone
from basecap.ops import exact_device
from basecap.testing._harness import Check, CheckReport, Harness, attempt, raised
from basecap.testing._initialisation import initialisation
from basecap.testing._precision import Lower, compilation
from basecap.testing._proofs import COSTS, FOUNDATIONS, LONG_PROOFS, PROOFS, finite, repetition, shape, untouched

#: Default length of the sequences: not a multiple of any chunk size, longer than the usual chunks of 64 and 128.
LENGTH = 147
#: Default length of the long test sequence, for causality and decoding: longer than blocks of 512 and 1,024.
LONGEST = 1100
#: Default precisions that are compared with float64.
DTYPES = (torch.float32, torch.bfloat16)


def check_mixer(
    name: str,
    *,
    hidden: int = 64,
    length: int = LENGTH,
    longest: int = LONGEST,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    device: torch.device | str = "cpu",
    options: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> CheckReport:
    """Check the contract of `Mixer` for every distinct layer of an architecture, and the initialisation of its models.

    Args:
        name: a registered architecture; as "X in Y" its models have backbone Y.
        hidden: model width.
        length: tokens per sequence, at least 32.
        longest: length of the long test sequence, for causality and decoding only, in the second layer; none if not
            longer than `length`.
        dtypes: precisions compared with float64, besides the checks made in float64 itself.
        device: where everything runs; on a device without float64 what is compared with that, which a CPU computes.
        options: options of the mixer on top of the architecture's and of `Mixer.tiny`.
        compiled: also trace with torch.compile, as one graph, and compare.

    Returns:
        A report; `report.raise_failures()` turns broken checks into an AssertionError.

    Raises:
        ConfigError: an unknown name, a length too short to cut into segments, options that do not fit, or a
            parameter without a recipe.
    """
    if length < 32:
        raise ConfigError(f"the suite needs sequences of at least 32 tokens, not {length}.")
    architecture = ARCHITECTURES.get(split_backbone(name)[0])
    device, options = torch.device(device), options or {}
    exact = exact_device(device)
    choices = [c for i, c in enumerate(architecture.layers) if c not in architecture.layers[:i]]
    checks: list[Check] = []
    for number, choice in enumerate(choices, 1):
        subject = name if len(architecture.layers) == 1 else f"{name}, layer {number}"
        if "b" in architecture.canon and "canon" in choice.mixer.Config.model_fields:
            options = {"canon": True, **options}
        try:
            harness = Harness(choice, subject, hidden, length, exact, options)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever the author's code raises
            checks.append(raised(subject, choice.mixer, "forward", error))
        else:
            checks += attempt(subject, choice.mixer, partial(_first, harness), "forward")
            if checks[-1].passed:
                long = partial(_long, choice, subject, hidden, longest, exact, options)
                later = {f"forward on {longest} tokens": long} if longest > length else {}
                checks += _others(
                    harness, [partial(Lower, harness, dtype, device) for dtype in dtypes], compiled, later
                )
    if all(check.passed for check in checks):
        start = partial(initialisation, name, hidden, exact, options)
        checks += attempt(name, choices[0].mixer, start, "initialisation")
    return CheckReport(architecture=name, checks=tuple(checks))


def _first(harness: Harness) -> Iterator[Check]:
    """Yield the checks that all others, which compare outputs with each other, depend on."""
    for prove in (shape, finite, untouched, repetition):
        yield prove(harness)


def _others(
    harness: Harness,
    lower: Sequence[Callable[[], Lower]],
    compiled: bool,
    long: Mapping[str, Callable[[], Iterator[Check]]],
) -> Iterator[Check]:
    """Yield the other checks of a layer, except those that would fail for the same reason as a failed one."""
    run = partial(attempt, harness.subject, harness.choice.mixer)
    for prove in COSTS:
        yield from run(partial(prove, harness), _title(prove))
    for prove in FOUNDATIONS:
        checks = list(run(partial(prove, harness), _title(prove)))
        yield from checks
        if not checks[-1].passed:
            return
    proofs: dict[str, Callable[[], Iterator[Check]]] = {_title(prove): partial(prove, harness) for prove in PROOFS}
    for precision in lower:
        proofs |= precision().proofs()
    if compiled:
        proofs["compilation"] = partial(compilation, harness)
    decodes = True
    for name, proof in {**proofs, **long}.items():
        if decodes or not (name.startswith("decoding in ") or name == "unequal prompts" or name in long):
            checks = list(run(proof, name))
            yield from checks
            if name == "decoding" and checks[-1].name.startswith("causality"):
                return
            decodes = decodes and (name != "decoding" or checks[-1].passed)


def _title(prove: Callable[[Harness], Iterator[Check]]) -> str:
    return prove.__name__.replace("_", " ")


def _long(
    choice: LayerChoice, subject: str, hidden: int, length: int, device: torch.device, options: Mapping[str, Any]
) -> Iterator[Check]:
    harness = Harness(choice, subject, hidden, length, device, options, last=True)
    for prove in LONG_PROOFS:
        yield from attempt(subject, choice.mixer, partial(prove, harness), f"{_title(prove)} on {length} tokens")

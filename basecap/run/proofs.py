"""What is proved of architectures before they train, and what stops those that are not proved."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from basecap.errors import BasecapError, ConfigError
from basecap.evals import padded_lengths
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.plan.runs import RunSpec
from basecap.run.provenance import plugin_files, seen_from_here, sources
from basecap.system.progress import phase
from basecap.testing.check_mixer import LONGEST as CHECKED
from basecap.testing.check_mixer import check_mixer
from basecap.testing.check_model import LONGEST, Precision, built_in, prove_causality
from basecap.testing.subject import undisturbed
from basecap.train.distributed import Processes
from basecap.train.placement import DevicePlacement
from basecap.version import __version__

#: Length of the sequences of the conformance checks before training.
SHORT = 64
#: Begins the names of checks that a mixer fails which sees the future or other sequences.
SEEING = ("causal", "length ", "batch invariance", "packed")
#: The option that lets an architecture train without a proof.
ALLOW = "--allow-unproved"

#: What was proved of each architecture, as environment.json keeps it.
Proofs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """What is wrong with an architecture that can be trained, as the end of a sentence that begins with its name.

    Attributes:
        words: what is wrong, also for reports and for who loads a model later.
        stops: no proof excludes a leak, so that it trains only where the user allows it.
        anyway: it trains, and `words` do not say so.
    """

    words: str
    stops: bool
    anyway: bool = False


def refuse_leaks(runs: Sequence[RunSpec], device: torch.device, held: Proofs | None = None) -> dict[str, Any]:
    """Return what was proved of the architectures that are not built in; raises ConfigError for one that leaks.

    Those that are built in are proved by the tests, and by `basecap check` with the kernels of this machine.

    Args:
        runs: of the study.
        device: where they will be trained.
        held: what was proved before; a proof of the same code in the same sizes is not repeated.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run.architecture for run in runs if not built_in(run.model)):
        own = [run for run in runs if run.architecture == name]
        run = max(own, key=lambda run: run.length)
        placement = DevicePlacement.choose(device, Processes(), run.train.precision)
        lengths = {length for run in own for length in run.lengths}
        lengths |= set() if run.task else {*padded_lengths(run.length)}
        rows = max(run.train.forward_batch(1) for run in own)
        key = _key(run, device, sorted(lengths), rows, placement.bf16)
        if held is not None and held.get(name, {}).get("key") == key:
            found[name] = held[name]
            continue
        precision = Precision(autocast=placement.autocast, bf16=placement.bf16, rows=rows)
        with phase(f"proof that {name} sees no future"), undisturbed(device):
            proof = prove_causality(run.model, device, precision, sorted(lengths), int(run.hash, 16))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if proof.refused is not None:
            raise ConfigError(f"mixer {name!r} ({_places(run.model)}) {proof.refused}; run {_command(run)}")
        found[name] = {"key": key, **proof.record()}
    return found


def _key(run: RunSpec, device: torch.device, lengths: Sequence[int], rows: int, bf16: bool) -> str:
    """Return what changes with the code and the sizes of a proof."""
    model = run.model.model_dump(mode="json", exclude={"vocab"})
    versions = [__version__, str(torch.__version__), device.type]
    content = [run.hash, model, sources(run.model), versions, list(lengths), rows, bf16]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def doubt(run: RunSpec, device: torch.device, proofs: Proofs, untested: Sequence[str], allowed: bool) -> Doubt | None:
    """Return what speaks against training a run's architecture, None for nothing.

    It is a proof that is missing, or checks of `basecap check` that mixers from plugins fail. Of these only the float64
    checks on short sequences run here: less than a second for most mixers. Checks of anything but causality, such as
    decoding, stop no study, as no verdict depends on them.

    Args:
        run: of the architecture.
        device: where it will be trained.
        proofs: by architecture.
        untested: what the leak test of its untrained model did not test.
        allowed: whether it trains without a proof.
    """
    if built_in(run.model):
        return None
    unproved = proofs.get(run.architecture, {}).get("unproved", [])
    repair = f"it is trained without, as {ALLOW} says" if allowed else f"repair it, or train it with {ALLOW}"
    details = f"for details run {_command(run)}"
    if unproved:
        words = f"is not proved to see no future ({_first_of(unproved)})"
        return Doubt(words=f"{words}; {repair}; {details}", stops=not allowed)
    if untested:
        words = f"is not fully tested for leaks on held-out text ({_first_of(untested)}); {repair}"
        return Doubt(words=words, stops=not allowed)
    broken: list[str] = []
    sees = False
    for name in checked_names(run.model):
        try:
            with undisturbed(device):
                report = check_mixer(name, length=SHORT, longest=0, dtypes=(), device=device)
        except BasecapError as error:  # such as a default that does not fit the small model of the checks
            return Doubt(words=f"cannot be checked: {error}", stops=False)
        broken += [f"{check.name}: {check.broken}" for check in report.failures]
        # A check that raised says nothing of causality, which is proved at the sizes of the study.
        sees |= any(check.name.startswith(SEEING) and check.error is not None for check in report.failures)
    if not broken:
        return None
    count = f"{len(broken)} check{'s' if len(broken) > 1 else ''}"
    words = f"fails {count} of basecap check ({broken[0]})"
    return Doubt(
        words=f"{words}; {repair}; {details}" if sees else f"{words}; {details}",
        stops=sees and not allowed,
        anyway=not sees,
    )


def _first_of(reasons: Sequence[str]) -> str:
    return reasons[0] + (f" and {len(reasons) - 1} more" if len(reasons) > 1 else "")


def _places(config: ModelConfig) -> str:
    """Return file:line of what is not built in."""
    uses = dict.fromkeys(layer.use for layer in config.layers if not ARCHITECTURES.built_in(layer.use))
    places = [ARCHITECTURES.origin(use) for use in uses]
    if not BACKBONES.built_in(config.backbone):
        places.append(BACKBONES.origin(config.backbone))
    return ", ".join(places)


def _command(run: RunSpec) -> str:
    """Return the command that shows the details."""
    options = [("--mixer", name) for name in checked_names(run.model)]
    options += [("--plugin", str(seen_from_here(file))) for file in plugin_files(run.model)]
    if run.model.max_length > CHECKED:
        options.append(("--length", str(min(run.model.max_length, LONGEST))))
    return shlex.join(["basecap", "check", *(word for option in options for word in option)])


def checked_names(config: ModelConfig) -> list[str]:
    """Return the names that `basecap check` takes for a model: those of plugins, or all without plugins."""
    uses = list(dict.fromkeys(layer.use for layer in config.layers))
    return [
        use if ARCHITECTURES.get(use).backbone == config.backbone else f"{use} in {config.backbone}"
        for use in [use for use in uses if not ARCHITECTURES.built_in(use)] or uses
    ]

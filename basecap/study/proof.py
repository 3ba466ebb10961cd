"""What a plugin's architecture must prove before it trains: a mixer that sees the future would win every comparison.

`basecap check` proves much more, and takes longer. Architectures that are built in are proved by the tests.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers._contract import ARCHITECTURES, generator_for
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.study.plan import RunSpec
from basecap.study.provenance import plugin_files

#: Tokens of the sequences, and ids they are drawn from. A power of two suits mixers that cut time into chunks.
LENGTH, VOCAB = 128, 64

#: Change of an earlier output, relative to its size, from which on it is a leak. Rounding, which a convolution by
#: Fourier transforms spreads over all positions, stays far below also in single precision.
LEAK = 1e-4


def refuse_unsound(runs: Sequence[RunSpec], device: torch.device) -> None:
    """Raise ConfigError when a plugin's architecture sees the future, is not finite or changes the shape.

    One that raises on so little is left to training, which keeps the trace and goes on with the others.
    """
    for run in {run.name: run for run in runs}.values():
        files = plugin_files(run.model)
        fault = _fault(run.model, device) if files else None
        if fault is not None:
            raise ConfigError(f"mixer {run.name!r} {fault}; run {_command(run, files)}")


def _fault(config: ModelConfig, device: torch.device) -> str | None:
    """Say what is wrong with a few layers of a model, None when nothing is."""
    patterns = [ARCHITECTURES.get(layer.use).layers for layer in config.layers]
    depth = math.lcm(len(patterns), *map(len, patterns))  # one of each
    if any(choice.mixer.takes_shared for pattern in patterns for choice in pattern):
        depth = max(depth, 2)
    few = {"vocab": VOCAB, "depth": min(depth, config.depth), "max_length": min(config.max_length, LENGTH)}
    small = config.model_copy(update=few)
    raised: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # a kernel may not know double precision
        try:
            return _seen(small, device, dtype)
        except Exception as error:  # whatever a plugin's code raises
            raised = error
    if isinstance(raised, ConfigError):  # a sentence already, such as that of another shape
        return f"cannot be trained ({str(raised).rstrip('.')})"
    return None


@torch.no_grad()
def _seen(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    length = config.max_length
    cuts = sorted({1, length // 3, length - 1} - {0, length}) or [length]
    generator = generator_for(0, "proof")
    tokens = torch.randint(VOCAB, (len(cuts), length), generator=generator)
    later = torch.arange(length) >= torch.tensor(cuts)[:, None]
    changed = torch.where(later, (tokens + 1) % VOCAB, tokens)
    for generic in (True, False):
        model = LanguageModel(config).initialise(0)
        if generic:
            _make_generic(model)
        model.to(device, dtype).eval()
        before, after = (_hidden(model, given.to(device)) for given in (tokens, changed))
        if before.isfinite().all() and after.isfinite().all():
            break  # else the values it starts from decide
    else:
        return "gives numbers that are not finite"
    for row, cut in enumerate(cuts):
        moved = (after[row, :cut] - before[row, :cut]).abs().max() / before.square().mean().sqrt()
        if moved > LEAK:
            return f"sees the future: outputs before position {cut} move when later tokens change"
    return None


def _hidden(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the final activations; what is random is the same each time, and nobody else's numbers move."""
    with torch.random.fork_rng([tokens.device] if tokens.device.type == "cuda" else []):
        return model.hidden(tokens).double()


def _make_generic(model: LanguageModel) -> None:
    """Move parameters off their first values: an output that starts at zero would hide all that stands before it."""
    for name, parameter in model.named_parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.add_(std * torch.randn(parameter.shape, generator=generator_for(0, f"generic {name}")))


def _command(run: RunSpec, files: Sequence[Path]) -> str:
    """Return the command that says more."""
    uses = list(dict.fromkeys(layer.use for layer in run.model.layers))
    body, here = run.model.backbone, Path.cwd()
    names = [
        use if ARCHITECTURES.get(use).backbone == body else f"{use} in {body}"
        for use in [use for use in uses if ARCHITECTURES.from_plugin(use)] or uses
    ]
    paths = [file.relative_to(here) if file.is_relative_to(here) else file for file in files]
    options = [("--mixer", name) for name in names] + [("--plugin", str(path)) for path in paths]
    return shlex.join(["basecap", "check", *(word for option in options for word in option)])

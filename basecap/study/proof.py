"""What an architecture of one's own must prove before it trains: one that sees the future would win every comparison.

`basecap check` proves much more, and takes longer. Architectures that are built in are proved by the tests.
"""

import contextlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers._contract import ARCHITECTURES, generator_for
from basecap.models.backbones._contract import BACKBONES
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.study.plan import RunSpec
from basecap.study.provenance import plugin_files

#: Tokens of the sequences, as far as the study's go: powers of two suit mixers that cut time into chunks. Only where
#: the first raise, as with larger chunks, the others are tried.
LENGTHS = (128, 1024)
#: The ids that the tokens are drawn from.
VOCAB = 64

#: Change of an earlier output, relative to its size, from which on it is a leak. Rounding, which a convolution by
#: Fourier transforms spreads over all positions, stays far below also in single precision.
LEAK = 1e-4


def refuse_unsound(runs: Sequence[RunSpec], device: torch.device) -> None:
    """Raise ConfigError when an architecture that is not built in sees the future, is not finite or changes the shape.

    One that raises on so little is left to training, which keeps the trace and goes on with the others.
    """
    for run in {run.name: run for run in runs}.values():
        fault = None if _built_in(run.model) else _fault(run.model, device)
        if fault is not None:
            raise ConfigError(f"mixer {run.name!r} {fault}; run {_command(run)}")


def _built_in(config: ModelConfig) -> bool:
    """Whether no part of a model comes from a plugin file or from another package."""
    return BACKBONES.built_in(config.backbone) and all(ARCHITECTURES.built_in(layer.use) for layer in config.layers)


def _fault(config: ModelConfig, device: torch.device) -> str | None:
    """Say what is wrong with a few layers of a model, None when nothing is."""
    patterns = [ARCHITECTURES.get(layer.use).layers for layer in config.layers]
    depth = max(2, math.lcm(len(patterns), *map(len, patterns)))  # one of each, and one that may read of another
    small = config.model_copy(update={"vocab": VOCAB, "depth": min(depth, config.depth)})
    raised: Exception | None = None
    for length in sorted({min(config.max_length, most) for most in LENGTHS}):
        for dtype in (torch.float64, torch.float32):  # a kernel may not know double precision
            try:
                return _seen(small, length, device, dtype)
            except Exception as error:  # whatever a plugin's code raises
                raised = error
    if isinstance(raised, ConfigError):  # a sentence already, such as that of another shape
        with contextlib.suppress(ConfigError), torch.device("meta"):  # which of the study's own depth can be built
            LanguageModel(small)
            return f"cannot be trained ({str(raised).rstrip('.')})"
    return None


@torch.no_grad()
def _seen(config: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> str | None:
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


def _command(run: RunSpec) -> str:
    """Return the command that says more."""
    files = plugin_files(run.model)
    uses = list(dict.fromkeys(layer.use for layer in run.model.layers))
    body, here = run.model.backbone, Path.cwd()
    names = [
        use if ARCHITECTURES.get(use).backbone == body else f"{use} in {body}"
        for use in [use for use in uses if not ARCHITECTURES.built_in(use)] or uses
    ]
    paths = [file.relative_to(here) if file.is_relative_to(here) else file for file in files]
    options = [("--mixer", name) for name in names] + [("--plugin", str(path)) for path in paths]
    return shlex.join(["basecap", "check", *(word for option in options for word in option)])

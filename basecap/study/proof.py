"""Refuses a study with an architecture that sees the future, before anything is written."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.study.plan import RunSpec
from basecap.study.provenance import plugin_files
from basecap.testing.check_mixer import LONGEST as CHECKED
from basecap.testing.check_model import LONGEST, Precision, find_leak, undisturbed
from basecap.train.distributed import Processes
from basecap.train.loop import Place


def refuse_unsound(runs: Sequence[RunSpec], device: torch.device) -> None:
    """Raise ConfigError when an architecture that is not built in leaks from later tokens or between packed documents.

    Those that are built in are proved by the tests, and by `basecap check` with the kernels of this machine.
    """
    for run in {run.architecture: run for run in runs if not _built_in(run.model)}.values():
        place = Place.choose(device, Processes(), run.train.precision)
        training = Precision(autocast=place.autocast, bf16=place.bf16, rows=run.train.forward_batch(1))
        with undisturbed(device):
            fault = find_leak(run.model, device, training)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if fault is not None:
            raise ConfigError(f"mixer {run.architecture!r} {fault}; run {_command(run)}")


def _built_in(config: ModelConfig) -> bool:
    """Whether no part of a model comes from a plugin file or from another package."""
    return BACKBONES.built_in(config.backbone) and all(ARCHITECTURES.built_in(layer.use) for layer in config.layers)


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
    if run.model.max_length > CHECKED:
        options.append(("--length", str(min(run.model.max_length, LONGEST))))
    return shlex.join(["basecap", "check", *(word for option in options for word in option)])

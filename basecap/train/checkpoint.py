"""Checkpoints: weights and optimiser state as safetensors, the rest as JSON, complete or absent.

checkpoints/step-<n>/model.safetensors      the weights and persistent buffers, loadable alone
                     optimiser.safetensors  Adam's moments, "<parameter>/<name>"
                     average.safetensors    averaged parameters, where the run averages them
                     state.json             step and model configuration
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from basecap.errors import CheckpointError
from basecap.files import settle
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.train.average import WeightAverage


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints by step; directories of other names are left alone."""
    steps = {path: path.name.removeprefix("step-") for path in directory.glob("step-*")}
    return sorted((int(step), path) for path, step in steps.items() if step.isdecimal())


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in `directory`, None when there is none."""
    steps = _steps(directory)
    return steps[-1][1] if steps else None


def _buffers(model: LanguageModel) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state; what is built in has none, a plugin's mixer may.

    A complex one is seen as pairs of real numbers, as older versions of safetensors know no others.
    """
    state = model.state_dict()
    persistent = {name: value for name, value in model.named_buffers() if name in state}
    return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in persistent.items()}


def _named_state(model: LanguageModel, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state[parameter].items()
    }


def save(
    directory: Path,
    model: LanguageModel,
    optimiser: torch.optim.Optimizer,
    step: int,
    average: WeightAverage | None = None,
) -> None:
    """Write the checkpoint after `step` steps, then remove older ones; raises CheckpointError when it cannot."""
    partial = directory / f".partial-{step}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # safetensors takes no views and no two names for one memory, which buffers may be
        buffers = {name: value.clone(memory_format=torch.contiguous_format) for name, value in _buffers(model).items()}
        save_file({**dict(model.named_parameters()), **buffers}, partial / "model.safetensors")
        save_file(_named_state(model, optimiser), partial / "optimiser.safetensors")
        if average is not None:
            save_file(average.values, partial / "average.safetensors")
        state = {"schema": 1, "step": step, "model": model.config.model_dump(mode="json")}
        (partial / "state.json").write_text(json.dumps(state))
        settle(partial)  # the older one goes next
        final = directory / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write a checkpoint to {directory}: {error}; make room or give another directory with --out."
        ) from error
    for _, old in _steps(directory)[:-1]:
        shutil.rmtree(old, ignore_errors=True)  # what is left of it is never the newest, and goes with the next


def _read(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} is unreadable ({name}: {error}); remove {path.parent.parent} to train it again."
        ) from error


def _read_state(path: Path) -> tuple[int, ModelConfig]:
    """Return step and model configuration; raises CheckpointError."""
    try:
        state = json.loads((path / "state.json").read_text())
        return int(state["step"]), ModelConfig.model_validate(state["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's error is a ValueError
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"checkpoint {path} is unreadable (state.json: {reason}); remove {path.parent.parent} to train it again."
        ) from error


def _load(path: Path, name: str, held: dict[str, Tensor]) -> None:
    """Copy every tensor of a file into the one of the same name in `held`; raises CheckpointError unless they agree."""
    tensors = _read(path, name)
    for key in sorted(held.keys() ^ tensors.keys()):
        here, there = ("model", "checkpoint") if key in held else ("checkpoint", "model")
        raise CheckpointError(f"checkpoint {path} is of another model: {key} is in the {here} but not in the {there}.")
    with torch.no_grad():
        for key, tensor in held.items():
            if tensor.shape != tensors[key].shape:
                raise CheckpointError(
                    f"checkpoint {path} is of another model: {key} is {tuple(tensors[key].shape)} there and "
                    f"{tuple(tensor.shape)} here."
                )
            tensor.copy_(tensors[key])


def _load_weights(path: Path, model: LanguageModel) -> None:
    _load(path, "model.safetensors", {**dict(model.named_parameters()), **_buffers(model)})


def restore(
    path: Path, model: LanguageModel, optimiser: torch.optim.Optimizer, average: WeightAverage | None = None
) -> int:
    """Load weights, optimiser state and averages; return the number of steps done. Raises CheckpointError."""
    _load_weights(path, model)
    if average is not None:
        _load(path, "average.safetensors", average.values)
    state = _read(path, "optimiser.safetensors")
    for name, parameter in model.named_parameters():
        optimiser.state[parameter] = {
            key.rpartition("/")[2]: value.to(parameter.device)
            for key, value in state.items()
            if key.rpartition("/")[0] == name
        }
    return _read_state(path)[0]


def _newest(directory: Path) -> Path:
    path = latest(directory)
    if path is None:
        raise CheckpointError(f"{directory} holds no checkpoint; give the directory of a run that has trained.")
    return path


def stored_config(directory: Path) -> ModelConfig:
    """Return what the model of the newest checkpoint under `directory` is made of; raises CheckpointError."""
    return _read_state(_newest(directory))[1]


def load_model(directory: Path) -> LanguageModel:
    """Return the model of the newest checkpoint under `directory`, on the CPU, with the weights that were evaluated.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = _newest(directory)
    model = LanguageModel(_read_state(path)[1])
    _load_weights(path, model)
    if (path / "average.safetensors").exists():
        _load(path, "average.safetensors", dict(model.named_parameters()))
    return model.eval()

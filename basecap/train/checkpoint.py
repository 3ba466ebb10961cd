"""Checkpoints: weights and optimiser state as safetensors, the rest as JSON, written atomically; the last two are kept.

resume/step-<n>/model.safetensors      weights and persistent buffers
                optimiser.safetensors  Adam's moments, "<parameter>/<name>"
                average.safetensors    averaged parameters, if train.average is set
                state.json             step and model configuration
                SHA256SUMS             checksums of these files, in the format of `sha256sum --check`

weights/step-<n>/    model.safetensors, state.json and SHA256SUMS of the evaluation points that `train.keep` selects,
                     with averaged parameters if train.average is set
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from basecap.data.hashes import file_digest
from basecap.errors import CheckpointError
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.system.files import LARGEST, fsync_files, process_name, share_mode, write_error
from basecap.system.foreign import read_file
from basecap.train.average import WeightAverage
from basecap.train.sharded_checkpoint import SHARD, has_shards, load_shards, shapes_of

#: Copies the values of a whole tensor, the second argument, to the first.
Fill = Callable[[Tensor, Tensor], None]
#: Version of the format, for programs that read it.
SCHEMA = 2
#: Number of checkpoints to keep: if the newest is damaged, a run resumes from the one before.
KEPT = 2
#: Files of a checkpoint and of stored weights.
CHECKPOINT, WEIGHTS = ("model.safetensors", "optimiser.safetensors", "state.json"), ("model.safetensors", "state.json")


def stored(directory: Path) -> dict[int, Path]:
    """Return the checkpoints or stored weights in a directory by step, ascending."""
    return dict(_steps(directory))


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the checkpoints, ascending; ignores directories with other names."""
    steps = {path: path.name.removeprefix("step-") for path in directory.glob("step-*")}
    return sorted((int(step), path) for path, step in steps.items() if step.isdecimal())


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint in `directory`, None when there is none."""
    steps = _steps(directory)
    return steps[-1][1] if steps else None


def _buffers(model: LanguageModel) -> dict[str, Tensor]:
    """Return the persistent buffers of a model. Mixers of plugins may have such buffers, built-in mixers do not.

    A complex buffer is viewed as pairs of real numbers, because older versions of safetensors lack complex dtypes.
    """
    state = model.state_dict()
    persistent = {name: value for name, value in model.named_buffers() if name in state}
    return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in persistent.items()}


def _weights(model: LanguageModel) -> dict[str, Tensor]:
    """Return parameters and buffers without views and shared memory, which safetensors refuses."""
    buffers = {name: value.clone(memory_format=torch.contiguous_format) for name, value in _buffers(model).items()}
    return {**dict(model.named_parameters()), **buffers}


def _named_state(model: LanguageModel, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state[parameter].items()
    }


def tensors_of(
    model: LanguageModel, optimiser: torch.optim.Optimizer, average: WeightAverage | None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by part ("model", "optimiser", "average") and name."""
    parts = {"model": _weights(model), "optimiser": _named_state(model, optimiser)}
    if average is not None:
        parts["average"] = average.values
    return parts


def _remove_older(directory: Path, step: int) -> None:
    """Remove all checkpoints but the last two up to `step`."""
    kept = [found for found in _steps(directory) if found[0] <= step][-KEPT:]
    for found in _steps(directory):
        if found not in kept:
            shutil.rmtree(found[1], ignore_errors=True)  # a partly removed one is damaged and is removed next time


def weights_of(model: LanguageModel) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of stored weights, as `tensors_of` does."""
    return {"model": _weights(model)}


def save_weights(directory: Path, model: LanguageModel, step: int) -> None:
    """Write the weights after `step` steps, keeping those of other steps; raises CheckpointError on failure."""
    partial = make_partial(directory, step)
    write_tensors(partial, weights_of(model))
    finish(partial, step, model.config)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Remove the directory and raise CheckpointError where writing it fails."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write a checkpoint to {partial.parent}: {write_error(error)} or give another directory with --out."
        ) from error


def make_partial(directory: Path, step: int) -> Path:
    """Make and return the directory of a checkpoint until it is complete; raises CheckpointError on failure."""
    partial = directory / f".partial-{step}-{process_name()}"
    with _writing(partial):
        for left in directory.glob(".partial-*"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)
        directory.mkdir(exist_ok=True)  # not the run's own directory, which may have been moved
        partial.mkdir()
    return partial


def write_tensors(partial: Path, parts: Mapping[str, dict[str, Tensor]]) -> None:
    """Write the tensors of each part of a checkpoint; raises CheckpointError on failure."""
    with _writing(partial):
        for name, tensors in parts.items():
            save_file(tensors, partial / f"{name}.safetensors")


def complete(partial: Path, step: int, config: ModelConfig) -> None:
    """Finish a checkpoint, then remove all but the last two; raises CheckpointError on failure.

    The rows of its run are flushed to the disk first. Checkpoints of later steps are removed too, because these steps
    will be trained again.
    """
    with _writing(partial):
        fsync_files(partial.parents[1])
    finish(partial, step, config)
    _remove_older(partial.parent, step)


def finish(partial: Path, step: int, config: ModelConfig) -> None:
    """Add state and checksums to the tensors and give the directory its name; raises CheckpointError on failure."""
    with _writing(partial):
        state = {"schema": SCHEMA, "step": step, "model": config.model_dump(mode="json")}
        (partial / "state.json").write_text(json.dumps(state))
        _write_checksums(partial)
        share_mode(partial, "state.json")
        fsync_files(partial)  # before an older checkpoint is removed
        final = partial.parent / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)


def _write_checksums(path: Path) -> None:
    lines = [f"{file_digest(file)}  {file.name}\n" for file in sorted(path.iterdir())]
    (path / "SHA256SUMS").write_text("".join(lines))


def _fault(path: Path, files: Sequence[str] = CHECKPOINT) -> str | None:
    """Return what is damaged in a checkpoint, None if all its files (at least `files`) match their checksums.

    Raises CheckpointError where this user may not read it.
    """
    try:
        lines = read_file(path / "SHA256SUMS", LARGEST).decode().splitlines()
        expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        needed = ("state.json",) if any(name.startswith(SHARD) for name in expected) else files
        for name in sorted({*needed, *expected}):
            if Path(name).name != name:
                return f"SHA256SUMS: {name} leads out of the directory"
            if file_digest(path / name) != expected.get(name):
                return f"{name} does not match SHA256SUMS"
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}); fix that and run again.") from error
    except OSError as error:
        return f"{Path(error.filename or path).name}: {error.strerror or error}"
    except ValueError as error:  # not text
        return f"SHA256SUMS: {error}"
    return None


def intact(directory: Path, log: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that matches its checksums, None when there are no checkpoints.

    Args:
        directory: the checkpoints of a run.
        log: called with a sentence for each damaged checkpoint that is skipped.

    Raises:
        CheckpointError: all checkpoints are damaged, or one cannot be read.
    """
    damaged: list[str] = []
    for _, path in reversed(_steps(directory)):
        fault = _fault(path)
        if fault is None:
            for message in damaged:
                log(f"{message}; resuming from {path.name}.")
            return path
        damaged.append(f"checkpoint {path} is damaged ({fault})")
    if damaged:
        raise CheckpointError(
            f"{damaged[0]} and there is no intact checkpoint; remove {directory.parent} to train it again."
        )
    return None


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
        state = json.loads(read_file(path / "state.json", LARGEST))
        return int(state["step"]), ModelConfig.model_validate(state["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's error is a ValueError
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"checkpoint {path} is unreadable (state.json: {reason}); remove {path.parent.parent} to train it again."
        ) from error


def _copy(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values)


def _load(path: Path, part: str, held: dict[str, Tensor], fill: Fill = _copy) -> None:
    """Copy the tensors of a part to those of `held` by name; raises CheckpointError if names or shapes differ."""
    shards = has_shards(path)
    tensors = {} if shards else _read(path, f"{part}.safetensors")
    found = shapes_of(path, part) if shards else {key: tensor.shape for key, tensor in tensors.items()}
    for key in sorted(held.keys() ^ found.keys()):
        here, there = ("model", "checkpoint") if key in held else ("checkpoint", "model")
        raise CheckpointError(
            f"checkpoint {path} belongs to another model: {key} is in the {here} but not in the {there}."
        )
    for key, tensor in held.items():
        if tensor.shape != found[key]:
            raise CheckpointError(
                f"checkpoint {path} belongs to another model: {key} has shape {tuple(found[key])} in the checkpoint "
                f"and {tuple(tensor.shape)} in the model."
            )
    with torch.no_grad():
        if shards:
            load_shards(path, {f"{part}/{key}": tensor for key, tensor in held.items()})
        for key, values in tensors.items():
            fill(held[key], values)


def _load_weights(path: Path, model: LanguageModel, fill: Fill = _copy) -> None:
    _load(path, "model", {**dict(model.named_parameters()), **_buffers(model)}, fill)


def restore(
    path: Path,
    model: LanguageModel,
    optimiser: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    fill: Fill = _copy,
) -> int:
    """Load weights, optimiser state and averages, and return the step; raises CheckpointError if that fails.

    `fill` copies the values of a whole tensor, its second argument, to a tensor of the model or like one.
    """
    _load_weights(path, model, fill)
    if average is not None:
        _load(path, "average", average.values, fill)
    names = _optimiser_names(path)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        own = {key: shape for key, shape in names.items() if key.rpartition("/")[0] == name}
        held = {
            key: torch.zeros_like(parameter)
            if shape == parameter.shape
            else torch.zeros(shape, device=parameter.device)
            for key, shape in own.items()
        }
        state |= held
        optimiser.state[parameter] = {key.rpartition("/")[2]: tensor for key, tensor in held.items()}
    _load(path, "optimiser", state, fill)
    return _read_state(path)[0]


def _optimiser_names(path: Path) -> dict[str, torch.Size]:
    """Return the shape of each tensor of an optimiser's state."""
    if has_shards(path):
        return shapes_of(path, "optimiser")
    return {key: tensor.shape for key, tensor in _read(path, "optimiser.safetensors").items()}


def _newest(directory: Path) -> Path:
    path = latest(directory)
    if path is None:
        raise CheckpointError(f"{directory} has no checkpoint; give the directory of a trained run.")
    fault = _fault(path)
    if fault is not None:
        earlier = [found for _, found in _steps(directory)][-2:-1]
        way_out = f"{path} to use {earlier[0].name}" if earlier else f"{directory.parent} to train it again"
        raise CheckpointError(f"checkpoint {path} is damaged ({fault}); remove {way_out}.")
    return path


def stored_config(directory: Path) -> ModelConfig:
    """Return the model configuration of the newest checkpoint in `directory`; raises CheckpointError if damaged."""
    return _read_state(_newest(directory))[1]


def load_stored(path: Path) -> LanguageModel:
    """Return the model of a checkpoint or of stored weights, on the CPU, with averaged weights if there are any.

    Raises:
        CheckpointError: it is damaged.
    """
    fault = _fault(path, WEIGHTS)
    if fault is not None:
        raise CheckpointError(f"{path} is damaged ({fault}); remove it.")
    return _load_evaluated(path)


def truncated(path: Path) -> list[str]:
    """Return the files of a checkpoint or of stored weights that are missing or not as long as their header says.

    It reads headers alone, where `load_stored` reads all to compare checksums.
    """
    shards = [found.name for found in path.glob(f"{SHARD}*.safetensors")]
    return [name for name in ([*shards, "state.json"] if shards else WEIGHTS) if not _is_whole(path / name)]


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if path.suffix == ".json":
                return isinstance(json.load(file), dict)
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return path.stat().st_size == 8 + size + max(ends, default=0)
    except PermissionError:  # it is for another user, and may be whole
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False


def load_unaveraged(path: Path) -> LanguageModel:
    """Return the model of a checkpoint, on the CPU, with the weights that training resumes from.

    Raises:
        CheckpointError: it cannot be read.
    """
    model = LanguageModel(_read_state(path)[1])
    _load_weights(path, model)
    return model.eval()


def _load_evaluated(path: Path) -> LanguageModel:
    model = load_unaveraged(path)
    if (path / "average.safetensors").exists() or (has_shards(path) and shapes_of(path, "average")):
        _load(path, "average", dict(model.named_parameters()))
    return model

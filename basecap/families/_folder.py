"""A folder with a published model: config.json, safetensors."""

import json
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from basecap.errors import ConfigError, DataError, nearest
from basecap.families._contract import FAMILIES, Family, ModelFile, WeightRow
from basecap.models import LanguageModel, ModelConfig
from basecap.models.outline import outline
from basecap.system.foreign import read_file

#: Maximum number of bytes of config.json and of an index of weights.
LARGEST = 1 << 26


def family_of(folder: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family of the model in a folder and the values of its config.json; reads no weights.

    Raises:
        ConfigError: a folder of another architecture, or one without config.json.
        DataError: a config.json that is damaged.
    """
    values = _json(folder / "config.json")
    kind = values.get("model_type")
    if kind == "basecap":
        raise ConfigError(f"{folder} was exported by basecap; `basecap report DIR DIR` joins its study with another.")
    if kind not in FAMILIES.names():
        hint = nearest(str(kind), FAMILIES.names())
        raise ConfigError(f"{folder} has a model of type {kind!r}, which cannot be imported; {hint}")
    return FAMILIES.get(kind), values


def read_model(folder: Path) -> LanguageModel:
    """Return the model of a folder, in float32 on the CPU.

    Raises:
        ConfigError: a folder of another architecture, or one without config.json or weights in safetensors.
        DataError: files that are damaged, or weights that are not those of the configuration.
    """
    family, values = family_of(folder)
    try:
        config = family.model(ModelFile(values))
    except ConfigError as error:
        raise ConfigError(f"{folder} cannot be imported: {error}") from error
    with ExitStack() as held:
        weights = {
            family.renamed.get(name, name): file
            for name, file in _open(folder, held).items()
            if not name.startswith(family.other_parts)
        }
        _refuse_other_size(config, family.rows(config), weights.keys(), folder)
        model = LanguageModel(config)
        _fill(model, list(family.rows(config)), weights, family.ignored, folder)
    return model.eval()


def _refuse_other_size(config: ModelConfig, rows: Iterator[WeightRow], names: Set[str], folder: Path) -> None:
    """Raise DataError for a model that is larger than its files, before memory for it is taken."""
    for name in (name for row in rows for name in row.theirs):
        if name not in names:
            raise DataError(f"{folder} lacks weight {name}; restore its files, or import another model of its family.")
    described, held = outline(config).parameters_count(), sum(path.stat().st_size for path in weight_files(folder))
    if described > held:  # a weight takes at least a byte
        raise DataError(
            f"{folder}: config.json describes {described:,} parameters, and its weights have {held:,} bytes; restore "
            "the files of one model."
        )


def _fill(
    model: LanguageModel,
    rows: list[WeightRow],
    weights: Mapping[str, Callable[[], Tensor]],
    ignored: tuple[str, ...],
    folder: Path,
) -> None:
    """Copy the published weights to the parameters; raises DataError unless each has its place."""
    parameters = dict(model.named_parameters())
    assert {row.ours for row in rows} == parameters.keys()
    named = {name for row in rows for name in row.theirs}
    repeated = {"lm_head.weight", "embed_out.weight"} if model.head is None else set()
    over = sorted(name for name in weights.keys() - named - repeated if not name.endswith(ignored))
    if over:
        raise DataError(
            f"{folder} has an unknown weight {over[0]}; restore its files, or import another model of its family."
        )
    with torch.no_grad():
        for row in rows:
            found = row.layout(*(weights[name]() for name in row.theirs))
            if found.shape != parameters[row.ours].shape:
                raise DataError(
                    f"{folder}: {row.theirs[0]} has a shape that makes {list(found.shape)}, and config.json describes "
                    f"{list(parameters[row.ours].shape)}; restore the files of one model."
                )
            if not found.isfinite().all():
                raise DataError(f"{folder}: {row.theirs[0]} has values that are no numbers; restore its file.")
            parameters[row.ours].copy_(found)


def _open(folder: Path, held: ExitStack) -> dict[str, Callable[[], Tensor]]:
    """Return how each weight is read, by its name; raises ConfigError without files, DataError for damaged ones."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path in weight_files(folder):
        try:
            file = held.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read ({error}); restore it.") from error
        found |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    return found


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the files of weights of a folder; raises ConfigError without any, DataError for a damaged index."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = _json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise DataError(f"{index} names no files of weights; restore it.")
        for name in sorted(set(names.values())):
            if Path(name).name != name:
                raise DataError(f"{index}: {name} leads out of the folder; give a sound index.")
            yield folder / name
    elif whole.is_file():
        yield whole
    else:
        raise ConfigError(
            f"{folder} has no model.safetensors; download the weights in that format, as pickled ones are not read."
        )


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raises ConfigError when it is not there, DataError when it is damaged."""
    try:
        content = json.loads(read_file(path, LARGEST))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}); give the folder of a model as the hub has it."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON; restore it.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; restore it.")
    return content

"""Datasets of the Hugging Face hub, or local ones, streamed file by file with the `datasets` library."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from basecap.data.sources._contract import SPLITS, Part
from basecap.errors import BasecapError, ConfigError, DataError


def parts(name: str) -> list[Part]:
    """Return one part per file of a dataset's train, validation and test splits."""
    found = []
    for split in SPLITS:
        with _errors_of(name):
            count = _dataset(name, split).num_shards
        found += [Part(f"{split}/{index}-of-{count}", split=split) for index in range(count)]
    return found


def records(name: str, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of a part."""
    split, _, place = part.name.partition("/")
    index, _, count = place.partition("-of-")
    with _errors_of(name):
        rows = _dataset(name, split).shard(num_shards=int(count), index=int(index))
        for number, record in enumerate(rows):
            location = f"{name}/{part.name}:{number + 1}"
            if not isinstance(record.get("text"), str):
                raise DataError(f'{location} has no text; choose a dataset whose records have the field "text".')
            yield location, record


def fingerprints(name: str, part: Part) -> dict[str, str]:
    """Return the commit of the dataset by the name of a part."""
    return {f"{name}/{part.name}": _revision(name)}


@cache
def _revision(name: str) -> str:
    """Return the commit of a dataset on the hub; "local" for a directory."""
    if Path(name).is_dir():
        return "local"
    from huggingface_hub import HfApi

    with _errors_of(name):
        return HfApi().dataset_info(name).sha or "unknown"


def _dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data.hub needs the datasets library; install basecap[hf].") from error
    commit = _revision(name)
    return datasets.load_dataset(name, split=split, streaming=True, revision=None if commit == "local" else commit)


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except BasecapError:
        raise
    except Exception as error:  # the libraries raise errors of many classes, which change between releases
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"dataset {name!r} cannot be read ({reason}); check data.hub and the network.") from error

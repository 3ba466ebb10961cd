"""Datasets of the Hugging Face hub, or local ones, streamed file by file with the `datasets` library."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from basecap.data.sources._contract import SPLITS, Part
from basecap.data.sources._lines import SUFFIXES, record_files
from basecap.errors import BasecapError, ConfigError, DataError


def parts(name: str) -> list[Part]:
    """Return one part per file of a dataset's train, validation and test splits."""
    found = []
    for split in SPLITS:
        with _errors_of(name):
            count = _dataset(name, split).num_shards
        found += [Part(f"{split}/{index}-of-{count}", split=split) for index in range(count)]
    return found


def files(name: str) -> list[str]:
    """Return the sorted names of the JSON Lines files of a dataset, for one whose splits are not the study's."""
    if Path(name).is_dir():
        return [path.relative_to(name).as_posix() for path in record_files(Path(name))]
    from huggingface_hub import HfApi

    with _errors_of(name):
        found = HfApi().list_repo_files(name, repo_type="dataset", revision=_revision(name))
    return sorted(file for file in found if file.endswith(SUFFIXES))


def records(name: str, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of a part that `parts` returned."""
    split, _, place = part.name.partition("/")
    index, _, count = place.partition("-of-")
    with _errors_of(name):
        rows = _dataset(name, split).shard(num_shards=int(count), index=int(index))
        yield from _with_text(f"{name}/{part.name}", rows)


def file_records(name: str, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of one of a dataset's `files`."""
    place = name if Path(name).is_dir() else f"hf://datasets/{name}@{_revision(name)}"
    with _errors_of(name):
        rows = _library().load_dataset("json", data_files=f"{place}/{file}", split="train", streaming=True)
        yield from _with_text(f"{name}/{file}", rows)


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


def _with_text(place: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, record in enumerate(rows, 1):
        if not isinstance(record.get("text"), str):
            raise DataError(f'{place}:{number} has no text; choose a dataset whose records have the field "text".')
        yield f"{place}:{number}", record


def _dataset(name: str, split: str) -> Any:
    commit = _revision(name)
    return _library().load_dataset(name, split=split, streaming=True, revision=None if commit == "local" else commit)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data.hub needs the datasets library; install basecap[hf].") from error
    return datasets


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except BasecapError:
        raise
    except Exception as error:  # the libraries raise errors of many classes, which change between releases
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        remedy = "check data.hub" if Path(name).is_dir() else "check data.hub and the network"
        raise DataError(f"dataset {name!r} cannot be read ({reason}); {remedy}.") from error

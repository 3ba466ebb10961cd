"""Datasets of the Hugging Face hub, or directories with copies of them, read file by file."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from basecap.data.hashes import digest, file_digest
from basecap.data.sources._contract import SPLITS, Part, SourceOptions, Split
from basecap.data.sources._lines import ENDINGS, SUFFIXES, read_records, record_files, records_of, refuse_pairs
from basecap.errors import BasecapError, ConfigError, DataError
from basecap.system.hub import refuse_unreachable

#: Bytes that are read ahead of a file on the hub.
AHEAD = 8 << 20


def files(name: str) -> list[str]:
    """Return the sorted names of the files of records in a dataset."""
    if Path(name).is_dir():
        return [path.relative_to(name).as_posix() for path in record_files(Path(name))]
    return sorted(file for file in _remote_files(name) if file.endswith(SUFFIXES))


def split_files(name: str, configuration: str | None = None) -> dict[str, list[str]]:
    """Return the files of each split of a dataset's configuration, as its card or the names of its files say."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data.hub needs the datasets library; install basecap[hub].") from error
    commit = _revision(name)
    with _errors_of(name):
        builder = datasets.load_dataset_builder(name, configuration, revision=commit)
        splits = dict(builder.config.data_files or {})
    found = {str(split): [_within(name, file) for file in urls] for split, urls in splits.items()}
    for file in (file for names in found.values() for file in names):
        if not file.endswith(SUFFIXES):
            raise DataError(f"dataset {name!r} holds {file}; only files that end in {ENDINGS} are read.")
    return found


def parts_of(options: SourceOptions, domain: str, splits: Mapping[str, Sequence[str]]) -> list[Part]:
    """Return the parts of a domain, one per file, named DOMAIN/FILE.

    The splits count where the dataset has all three, and an unseen domain then needs no training files; otherwise
    documents are split by their hashes. `data.max_files` chooses files by the hashes of their names.
    """
    groups: dict[Split | None, Sequence[str]] = {split: splits[split] for split in SPLITS if split in splits}
    if len(groups) < len(SPLITS):
        groups = {None: [file for names in splits.values() for file in names]}
    elif domain in options.ood:
        del groups["train"]
    refuse_pairs([Path(file) for names in groups.values() for file in names], SUFFIXES)
    return [
        Part(f"{domain}/{file}", split=split)
        for split, names in groups.items()
        for file in sorted(sorted(names, key=digest)[: options.max_files])
    ]


def description(options: SourceOptions, datasets: Iterable[tuple[str, str | None]]) -> str | None:
    """Return the rest of "the text is streamed from": datasets, each with its published size, None without one.

    Directories, and absolute paths that should be one, are not on the hub.
    """
    remote = [(name, size) for name, size in datasets if not (Path(name).is_absolute() or Path(name).is_dir())]
    if not remote:
        return None
    found = dict.fromkeys(name if size is None else f"{name} ({size})" for name, size in remote)
    count = options.max_files
    files = f"{count} file{'s' if count > 1 else ''}" if count else "all files (data.max_files limits them)"
    return f"the Hugging Face hub, {files} of each domain and split: {', '.join(found)}"


def records(name: str, file: str, keys: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each record of one of a dataset's files; see `records_of`."""
    if Path(name).is_dir():
        yield from read_records(Path(name, file), keys)
        return
    from huggingface_hub import HfFileSystem

    place = f"datasets/{name}@{_revision(name)}/{file}"
    with _errors_of(name), HfFileSystem().open(place, "rb", block_size=AHEAD) as opened:
        yield from records_of(PurePosixPath(name, file), opened, keys)


def fingerprint(name: str, file: str) -> str:
    """Return the commit of a dataset on the hub, or the SHA-256 of a file in a directory."""
    return file_digest(Path(name, file)) if Path(name).is_dir() else _revision(name) or "unknown"


@cache
def _remote_files(name: str) -> list[str]:
    from huggingface_hub import HfApi

    with _errors_of(name):
        return HfApi().list_repo_files(name, repo_type="dataset", revision=_revision(name))


@cache
def _revision(name: str) -> str | None:
    """Return the commit of a dataset on the hub, None for a directory."""
    if Path(name).is_dir():
        return None
    if Path(name).is_absolute():
        raise DataError(f"dataset {name!r} cannot be read (there is no such directory); check the directory.")
    from huggingface_hub import HfApi

    refuse_unreachable(f"dataset {name!r}", "check the network, or give data.hub a directory with a copy")
    with _errors_of(name):
        return HfApi().dataset_info(name).sha


def _within(name: str, url: str) -> str:
    """Return the name of a file within its dataset; raises DataError for one that is not in its directory."""
    if remote := re.fullmatch(r"hf://datasets/[^@]+@[^/]+/(.+)", url):
        return remote[1]
    path, directory = Path(url).absolute(), Path(name).absolute()
    if not path.is_relative_to(directory) or ".." in path.relative_to(directory).parts:
        raise DataError(f"dataset {name!r} names the file {url}, which is not in it; correct its card.")
    return path.relative_to(directory).as_posix()


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except BasecapError:
        raise
    except Exception as error:  # the libraries raise errors of many classes, which change between releases
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        remedy = "the directory" if Path(name).is_dir() else "its name and the network"
        raise DataError(f"dataset {name!r} cannot be read ({reason}); check {remedy}.") from error

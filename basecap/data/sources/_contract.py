"""What a source of text is: it names its parts, and reads the documents of one part."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from basecap.data.hashes import file_digest, text_number
from basecap.errors import ConfigError, DataError, nearest
from basecap.registry import PLUGIN, Registry

if TYPE_CHECKING:
    from basecap.data.config import DataConfig

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One text of one domain. Its tokens never share a split with another part of it.

    Attributes:
        cluster: label of the documents that `data.cluster` puts together, None where this one stands alone.
    """

    domain: str
    split: Split
    text: str
    cluster: str | None = None


@dataclass(frozen=True)
class Part:
    """What one process reads in one go, and what becomes one token shard.

    Attributes:
        name: unique in the source; the order of parts is that of the hashes of their names.
        paths: files that are read.
        split: the split of all its documents, where that is known.
    """

    name: str
    paths: tuple[Path, ...] = ()
    split: Split | None = None


class Source(ABC):
    """Text of one kind. Registered subclasses define `parts` and `read`; both must be deterministic."""

    #: Domains that a study may name; empty where they depend on what the directory holds.
    known_domains: ClassVar[tuple[str, ...]] = ()

    #: Which of the options `path` and `hub` it reads; the others are refused.
    reads: ClassVar[tuple[str, ...]] = ("path",)

    #: Whether documents are records, whose keys `data.cluster` may name; otherwise they are files, which have a path.
    has_records: ClassVar[bool] = True

    def __init__(self, config: "DataConfig"):
        self.config = config

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return the parts that hold the study's domains; raises ConfigError, DataError when there are none."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[Document]:
        """Yield the documents of a part, also of domains nobody asked for; raises DataError naming file and line."""

    def keys(self, part: Part) -> tuple[str, ...]:
        """Return what `data.cluster` may name, for a message; nothing where that is not known."""
        return ()

    def record_cluster(self, record: Mapping[str, Any]) -> str | None:
        """Return the label that a record has under the dotted key `data.cluster`, None without one."""
        found: Any = record if self.config.cluster else None
        for key in (self.config.cluster or "").split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return str(found) if isinstance(found, str | int | float) and found != "" else None

    def path_cluster(self, path: PurePath) -> str | None:
        """Return the first folders of a relative path, as many as `data.cluster` says; None for a file in no folder."""
        if self.config.cluster is None:
            return None
        return "/".join(path.parent.parts[: int(self.config.cluster.partition("/")[2] or 1)]) or None

    def split_of(self, domain: str, text: str) -> Split:
        """Return the split of a text by its hash, for sources that name none."""
        return split_of(text, trained=domain not in self.config.ood)

    def remark(self) -> str | None:
        """Return what a reader of the results has to know of the text, one line without a full stop; None for nothing.

        Asked once, when the text is prepared.
        """
        return None

    def fingerprints(self, part: Part) -> dict[str, str]:
        """Return what the manifest says of a part: per file its name and the SHA-256 of its content.

        A part without files is taken to depend on the options alone. A plugin's code is no part of it: the manifest
        holds the text that it gave.
        """
        return {self.name_of(path): file_digest(path) for path in part.paths} or {part.name: self.config.options_hash}

    def name_of(self, path: Path) -> str:
        """Return what the manifest calls a file: the same on every machine."""
        return path.relative_to(self.directory()).as_posix()

    def directory(self) -> Path:
        """Return the directory of the text; raises ConfigError, DataError without one."""
        if self.config.path is None:
            raise ConfigError(f"source {self.config.source!r} reads a directory; give it with --set data.path=DIR.")
        path = Path(self.config.path)
        if not path.is_dir():
            below = "" if path.is_absolute() else f" below {Path.cwd()}"
            raise DataError(f"data.path {path} is not a directory{below}; give the one that holds the text.")
        return path

    def missing(self, domain: str, known: Iterable[str]) -> DataError:
        """Return the error for a domain that the directory does not hold."""
        return DataError(f"{self.config.path} has no domain {domain!r}: {nearest(domain, known)}")


def files_below(directory: Path) -> list[Path]:
    """Return the files below a directory, sorted; raises DataError for a link behind which text would be left out."""
    paths = sorted(directory.rglob("*"))
    for path in paths:
        if path.is_symlink() and not path.is_file():
            where = "a folder" if path.exists() else "nothing"
            raise DataError(f"{path} is a link to {where}; put files in its place.")
    return [path for path in paths if path.is_file()]


SOURCES: Registry[type[Source]] = Registry("source", "basecap.data.sources", "domains")


def plugin_of(name: str) -> Path | None:
    """Return the plugin file that defines a source, None where none does; raises ConfigError for an unknown name."""
    module = sys.modules[SOURCES.get(name).__module__]
    return Path(module.__file__ or "") if module.__name__.startswith(PLUGIN) else None


def source(name: str) -> Callable[[type[Source]], type[Source]]:
    """Class decorator: register a source under `name`."""

    def register(cls: type[Source]) -> type[Source]:
        SOURCES.add(name, cls, cls)
        return cls

    return register


def split_of(text: str, trained: bool = True) -> Split:
    """Return the split that a text's hash draws: train 80 %, validation and test 10 % each.

    Domains that are not trained on have no use for a train split: validation and test 50 % each. The top bits decide,
    the document's place in its shard comes from all of them: within a split it is still random.

    >>> split_of("two"), split_of("two", trained=False)
    ('train', 'validation')
    """
    tenth = text_number(text) * 10 >> 64
    if not trained:
        return "test" if tenth < 5 else "validation"
    return ("test", "validation")[tenth] if tenth < 2 else "train"

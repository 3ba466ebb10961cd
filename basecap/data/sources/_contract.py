"""The interface of sources of text: a source lists its parts and reads the documents of a part."""

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, Protocol

from basecap.data.hashes import file_digest, text_number
from basecap.errors import ConfigError, DataError, nearest
from basecap.plugins import PLUGIN, faults
from basecap.registry import Registry

Split = Literal["train", "validation", "test"]
#: Stands for a domain in `data.hub`.
PLACEHOLDER = "{domain}"
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One text of one domain. All of its tokens are in the same split.

    Attributes:
        cluster: label shared by the documents that `data.cluster` groups together, None for a document on its own.
    """

    domain: str
    split: Split
    text: str
    cluster: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what would be lost, or written wrongly, without a word."""
        if self.split not in SPLITS:
            raise ValueError(f"a document has the split {self.split!r}; give one of {', '.join(SPLITS)}")
        if not isinstance(self.text, str):
            raise ValueError(f"the text of a document is {type(self.text).__name__}, not str")


@dataclass(frozen=True)
class Part:
    """The unit of work of a process; it becomes one token shard.

    Attributes:
        name: unique within the source; parts are ordered by the hashes of their names.
        paths: files to read.
        split: the split of all its documents, None if they differ.
    """

    name: str
    paths: tuple[Path, ...] = ()
    split: Split | None = None


class SourceOptions(Protocol):
    """What a source uses of the section `data` of a study; `basecap.data.DataConfig` has these and checks them."""

    @property
    def source(self) -> str:
        """Name of the source."""

    @property
    def path(self) -> str | None:
        """Directory of the text."""

    @property
    def hub(self) -> str | None:
        """Name of a Hugging Face dataset."""

    @property
    def train(self) -> tuple[str, ...]:
        """Domains to train on."""

    @property
    def ood(self) -> tuple[str, ...]:
        """Unseen domains: only tested."""

    @property
    def cluster(self) -> str | None:
        """What documents that are drawn together have in common."""

    @property
    def max_files(self) -> int | None:
        """Maximum number of files of each domain and split of a dataset of the hub."""

    @property
    def options_hash(self) -> str:
        """Hash of the options that the tokens depend on."""


class Source(ABC):
    """A source of text. Registered subclasses define `parts` and `read`; both must be deterministic."""

    #: Domains that a study can name; empty if they depend on the content of the directory.
    known_domains: ClassVar[tuple[str, ...]] = ()

    #: Which of the options `path`, `hub` and `max_files` the source uses; setting another is an error.
    reads: ClassVar[tuple[str, ...]] = ("path",)

    #: Whether documents are records with keys for `data.cluster`; otherwise they are files with a path.
    has_records: ClassVar[bool] = True

    def __init__(self, config: SourceOptions):
        self.config = config

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return the parts with the study's domains; raises ConfigError or DataError when there are none."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[Document]:
        """Yield the documents of a part, possibly of other domains too; raises DataError that names file and line."""

    def documents(self, part: Part) -> Iterator[Document]:
        """Yield what `read` does; raises DataError, with the line of a plugin, for whatever its code may raise."""
        with faults(f"source {self.config.source!r} cannot read {part.name!r}", DataError):
            for document in self.read(part):
                if not isinstance(document, Document):
                    raise TypeError(f"read yields {type(document).__name__}, not Document")
                yield document

    def keys(self, part: Part) -> tuple[str, ...]:
        """Return keys to suggest for `data.cluster`, none if they are unknown."""
        return ()

    @classmethod
    def about(cls, domain: str) -> dict[str, str]:
        """Return what `basecap list domains` shows of a domain: its "summary", and more for its JSON."""
        return {"summary": (cls.__doc__ or "").partition("\n")[0]}

    @property
    def cluster_keys(self) -> tuple[str, ...]:
        """The dotted key `data.cluster` of records, if it is set."""
        return () if self.config.cluster is None else (self.config.cluster,)

    def record_cluster(self, record: Mapping[str, Any]) -> str | None:
        """Return the value of a record under the dotted key `data.cluster`, None if it lacks the key or has NaN."""
        found = None if self.config.cluster is None else value_of(record, self.config.cluster)
        if isinstance(found, float) and math.isnan(found):  # how pandas writes a missing value
            return None
        return str(found) if isinstance(found, str | int | float) and found != "" else None

    def path_cluster(self, path: PurePath) -> str | None:
        """Return the first folders of a relative path, as many as `data.cluster` sets; None for a file in no folder."""
        if self.config.cluster is None:
            return None
        return "/".join(path.parent.parts[: int(self.config.cluster.partition("/")[2] or 1)]) or None

    def split_of(self, domain: str, text: str) -> Split:
        """Return the split of a text by its hash, for sources without splits."""
        return split_of(text, trained=domain not in self.config.ood)

    def download(self) -> str | None:
        """Return what is read over the network, as the rest of "the text is streamed from", None for nothing."""
        return None

    def remark(self) -> str | None:
        """Return a remark about the text for readers of the results, one line without a full stop, or None.

        Called once, when the text is prepared.
        """
        return None

    def fingerprints(self, part: Part) -> dict[str, str]:
        """Return the entries of a part in the manifest: the name of each file and the SHA-256 of its content.

        A part without files is assumed to depend on the options only. The code of a plugin is not included, because
        the manifest describes the text.
        """
        return {self.name_of(path): file_digest(path) for path in part.paths} or {part.name: self.config.options_hash}

    def name_of(self, path: Path) -> str:
        """Return the name of a file in the manifest, the same on every machine."""
        return path.relative_to(self.directory()).as_posix()

    def directory(self) -> Path:
        """Return `data.path`; raises ConfigError when it is not set, DataError when it is not a directory."""
        if self.config.path is None:
            raise ConfigError(f"source {self.config.source!r} needs a directory; give it with --set data.path=DIR.")
        path = Path(self.config.path)
        if not path.is_dir():
            below = "" if path.is_absolute() else f" below {Path.cwd()}"
            raise DataError(f"data.path {path} is not a directory{below}; give the directory of the text.")
        return path

    def missing(self, domain: str, needs: str, known: Iterable[str]) -> DataError:
        """Return the error for a domain that is not in the directory; `needs` says which files it should have."""
        return DataError(f"{self.config.path} has no domain {domain!r} ({needs}): {nearest(domain, known)}")


def value_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key, whose dots separate levels or are part of a key; None without one."""
    if key in record:
        return record[key]
    for dot in re.finditer(r"\.", key):
        below = record.get(key[: dot.start()])
        if isinstance(below, Mapping) and (found := value_of(below, key[dot.end() :])) is not None:
            return found
    return None


def files_below(directory: Path) -> list[Path]:
    """Return the sorted files below a directory, without hidden ones (.git, ._NAME of macOS).

    Raises DataError for a link that is not followed, which hides text, and for what is neither file nor folder.
    """
    found = sorted(directory.rglob("*"))
    paths = [path for path in found if not any(part[0] == "." for part in path.relative_to(directory).parts)]
    for path in paths:
        if path.is_file() or (path.is_dir() and not path.is_symlink()):
            continue
        what = "no regular file"
        if path.is_symlink() and (path.is_dir() or not path.exists()):
            what = f"a link {'to a folder' if path.exists() else 'without a target'}"
        raise DataError(f"{path} is {what}; replace it by files.")
    return [path for path in paths if path.is_file()]


SOURCES: Registry[type[Source]] = Registry("source", "basecap.data.sources", "domains")


def plugin_of(name: str) -> Path | None:
    """Return the plugin file that defines a source, None for a built-in one; raises ConfigError for an unknown name."""
    module = sys.modules[SOURCES.module(name)]
    return Path(module.__file__ or "") if module.__name__.startswith(PLUGIN) else None


def source(name: str) -> Callable[[type[Source]], type[Source]]:
    """Register the decorated class as source `name`."""

    def register(cls: type[Source]) -> type[Source]:
        SOURCES.add(name, cls, cls)
        return cls

    return register


def split_of(text: str, trained: bool = True) -> Split:
    """Return the split of a text by its hash: train 80 %, validation and test 10 % each.

    Domains that are not trained on need no train split: validation and test 50 % each. The split uses the top bits of
    the hash and the order within a shard all bits, so documents are still in random order within a split.

    >>> split_of("two"), split_of("two", trained=False)
    ('train', 'validation')
    """
    tenth = text_number(text) * 10 >> 64
    if not trained:
        return "test" if tenth < 5 else "validation"
    return ("test", "validation")[tenth] if tenth < 2 else "train"

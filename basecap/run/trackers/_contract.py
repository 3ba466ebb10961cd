"""The interface of trackers: a tracker takes the rows of one run, which are on disk already."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from basecap.errors import ConfigError
from basecap.registry import Registry


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracker gets it.

    Attributes:
        study: title of its study.
        name: of its directory, such as "mamba-2-s0".
        identity: hexadecimal digits, the same whenever the run goes on.
        directory: for files of the tracker.
        where: what the option gives after a colon, such as the address of a server.
        about: settings of the run.
    """

    study: str
    name: str
    identity: str
    directory: Path
    where: str | None
    about: Mapping[str, Any]


class Tracker(ABC):
    """Passes the rows of one run on to a library, offline unless `where` says otherwise.

    Subclasses import their library when they are made. Whatever one raises ends the tracking of the study with a
    warning, and nothing else.
    """

    #: The library, and the extra of basecap that installs it.
    library: ClassVar[str]

    #: What `where` must match, and how a message describes it.
    places: ClassVar[tuple[str, str]] = (".+", "a place")

    @classmethod
    def refuse(cls, name: str, where: str) -> None:
        """Raise ConfigError when `where` is no place of this tracker, which is registered as `name`."""
        pattern, described = cls.places
        if re.fullmatch(pattern, where) is None:
            raise ConfigError(f"--track {name}:{where}: give {described} after the colon, or {name} alone.")

    @abstractmethod
    def __init__(self, run: TrackedRun):
        """Begin a run, or continue it."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take finite numbers by their names, such as "train/loss" or "domain-loss/c4/loss"; steps may come again."""

    def flush(self) -> None:  # noqa: B027 (most libraries write at once)
        """Write what is held: afterwards the rows count as sent, also when the process is killed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the run, after `flush`."""


TRACKERS: Registry[type[Tracker]] = Registry("tracker", "basecap.run.trackers")


def tracker(name: str) -> Callable[[type[Tracker]], type[Tracker]]:
    """Register the decorated class as tracker `name`."""

    def register(cls: type[Tracker]) -> type[Tracker]:
        TRACKERS.add(name, cls, cls)
        return cls

    return register

"""The registry class for everything that has a name: mixers, backbones, evaluations, sources, tasks, executors."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from basecap.errors import ConfigError, describe_error, nearest
from basecap.plugins import registering_module

T = TypeVar("T")
#: Place of a class that is in no file.
TYPED = "a cell or a prompt"


class Registry(Generic[T]):
    """A mapping of names to entries of one kind, found by importing every module of a package.

    An entry registers itself when its module is imported, so a new entry needs only a new file. Duplicate names are an
    error, unknown names get the nearest valid name as a hint, and the origin (file:line) of every entry is known.
    """

    def __init__(self, kind: str, package: str, listing: str | None = None):
        """Create an empty registry of entries called `kind`, defined in `package`, shown by `basecap list LISTING`."""
        self.kind = kind
        self.package = package
        self.listing = listing
        self._entries: dict[str, T] = {}
        self._defined_by: dict[str, type | Callable] = {}
        self._modules: dict[str, str] = {}
        self._discovered = False
        self._entry_points: Sequence[EntryPoint] = ()

    def add(self, name: str, entry: T, defined_by: type | Callable, module: str | None = None) -> None:
        """Register `entry` under `name`; raises ConfigError when the name is taken.

        A class of a notebook takes the place of an earlier one of that notebook, as when its cell runs again.
        Its module is `module`, by default that of `defined_by`, or the plugin that imports it from beside itself.
        """
        if not name.strip() or not name.isprintable():
            where = source_location(defined_by)
            raise ConfigError(f"{self.kind} {name!r} ({where}) needs a name for tables; give one line of text.")
        if name in self._entries:
            before, now = source_location(self._defined_by[name]), source_location(defined_by)
            if before == now != TYPED:
                raise ConfigError(f"{self.kind} {name!r} ({now}) is registered twice; its file may import itself.")
            if before != now:
                raise ConfigError(f"{self.kind} {name!r} is registered twice: {before} and {now}; rename one.")
        self._entries[name] = entry
        self._defined_by[name] = defined_by
        self._modules[name] = registering_module(module or defined_by.__module__)

    def get(self, name: str) -> T:
        """Return the entry called `name`; raises ConfigError with the nearest name when there is none."""
        self._discover()
        if name not in self._entries:
            hint = nearest(name, self._entries, see=self.listing and f"basecap list {self.listing}")
            raise ConfigError(f"unknown {self.kind} {name!r}: {hint} For one in your own file, add --plugin FILE.")
        return self._entries[name]

    def origin(self, name: str) -> str:
        """Return file:line of the class or function registered as `name`."""
        self.get(name)
        return source_location(self._defined_by[name])

    def module(self, name: str) -> str:
        """Return the module that registered `name`."""
        self.get(name)
        return self._modules[name]

    def built_in(self, name: str) -> bool:
        """Whether `name` belongs to basecap itself rather than to a plugin file or another package."""
        return self.module(name).startswith(f"{self.package}.")

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield (name, entry) in alphabetical order."""
        self._discover()
        yield from sorted(self._entries.items())

    def names(self) -> list[str]:
        """Return all names in alphabetical order."""
        return [name for name, _ in self.items()]

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self.package}.{module.name}")
        self._entry_points = tuple(entry_points(group=self.package))  # finding them takes 20 ms
        for entry_point in self._entry_points:
            try:
                entry_point.load()
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:  # other people's code may raise anything
                owner = f"package {entry_point.dist.name}" if entry_point.dist else f"entry point {entry_point.name}"
                raise ConfigError(
                    f"{owner} cannot be imported: {describe_error(error)}; fix or uninstall it."
                ) from error

    def package_of(self, module: str) -> str | None:
        """Return "name version" of the installed plugin package that contains `module`, None when there is none."""
        self._discover()
        for entry_point in self._entry_points:
            if entry_point.dist and entry_point.module.partition(".")[0] == module.partition(".")[0]:
                return f"{entry_point.dist.name} {entry_point.dist.version}"
        return None


def source_location(defined_by: type | Callable) -> str:
    """Return file:line of a class or function, `TYPED` for a class that was typed into a notebook or a terminal.

    Takes milliseconds, as it reads the source file.
    """
    try:
        file = inspect.getsourcefile(defined_by)
    except OSError:
        return TYPED
    return f"{file}:{inspect.findsource(inspect.unwrap(defined_by))[1] + 1}"  # whose end is not looked for

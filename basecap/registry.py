"""The registry class for everything that has a name: mixers, backbones, evaluations, sources, tasks."""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from basecap.errors import ConfigError, describe_error, nearest
from basecap.system.files import real_path

T = TypeVar("T")

#: Prefix of the module names of plugin files.
PLUGIN = "basecap_plugin_"
#: SHA-256 of the code that a plugin's module was loaded from, by its name: the files may change while a study runs.
_loaded: dict[str, str] = {}
#: Plugins by the modules beside them that they imported and that registered something.
_owners: dict[str, str] = {}


class Registry(Generic[T]):
    """A mapping of names to entries of one kind, found by importing every module of a package.

    An entry registers itself when its module is imported, so a new entry needs only a new file. Duplicate names are an
    error, unknown names get the nearest valid name as a hint, and the origin (file:line) of every entry is known.
    """

    #: Number of entries in all registries together.
    total: ClassVar[int] = 0
    #: Module name and directory of the plugin file that is being imported.
    plugin: ClassVar[tuple[str, Path] | None] = None

    def __init__(self, kind: str, package: str, listing: str | None = None):
        """Create an empty registry of entries called `kind`, defined in `package`, shown by `basecap list LISTING`."""
        self.kind = kind
        self.package = package
        self.listing = listing
        self._entries: dict[str, T] = {}
        self._defined_by: dict[str, type | Callable] = {}
        self._modules: dict[str, str] = {}
        self._discovered = False

    def add(self, name: str, entry: T, defined_by: type | Callable, module: str | None = None) -> None:
        """Register `entry` under `name`; raises ConfigError when the name is taken.

        Its module is `module`, by default that of `defined_by`, or the plugin that imports it from beside itself.
        """
        if name in self._entries:
            places = f"{source_location(self._defined_by[name])} and {source_location(defined_by)}"
            raise ConfigError(f"{self.kind} {name!r} is registered twice: {places}; rename one.")
        Registry.total += 1
        self._entries[name] = entry
        self._defined_by[name] = defined_by
        self._modules[name] = _claimed(module or defined_by.__module__)

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
        for entry_point in entry_points(group=self.package):
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
        for entry_point in entry_points(group=self.package):
            if entry_point.dist and entry_point.module.partition(".")[0] == module.partition(".")[0]:
                return f"{entry_point.dist.name} {entry_point.dist.version}"
        return None


def owner(module: str) -> str:
    """Return the plugin that imported a module from beside itself, else the module."""
    return _owners.get(module, module)


def _claimed(module: str) -> str:
    """Return the owner of a module that registers something now."""
    top = module.partition(".")[0]
    if Registry.plugin is not None and top != __package__ and not top.startswith(PLUGIN):
        name, folder = Registry.plugin
        if _found_in(top) == folder:
            _owners[module] = name
    return owner(module)


def source_location(defined_by: type | Callable) -> str:
    """Return file:line of a class or function. Takes milliseconds, as it reads the source file."""
    return f"{inspect.getsourcefile(defined_by)}:{inspect.getsourcelines(defined_by)[1]}"


def load_plugin(path: Path, digest: str | None = None) -> str:
    """Import a plugin file, so that a study can name what it registers, unless it is loaded; return its digest.

    Args:
        path: the file.
        digest: that of another process, whose code this process must have; None: any.

    Raises:
        ConfigError: the file cannot be imported or registers nothing, or the digest is another.
    """
    path = real_path(path)
    name = PLUGIN + path.stem
    if name in sys.modules and sys.modules[name].__file__ != str(path):  # a file of the same name in another directory
        name += f"_{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"
    if name not in sys.modules:
        _loaded[name] = _import_plugin(path, name)
    if digest not in (None, _loaded[name]):
        raise ConfigError(
            f"plugin file {path}, or a file beside it that it imports, changed since this command started; run the "
            "same command again."
        )
    return _loaded[name]


def _import_plugin(path: Path, name: str) -> str:
    """Import a plugin file as module `name` and return its digest; raises ConfigError when that fails."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"plugin file {path} {what}; give the path of a Python file.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugin file {path} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import the files beside it; what is installed comes first
    before = Registry.total
    Registry.plugin = name, path.parent
    try:
        with contextlib.chdir("."):  # the plugin may enter another directory; paths of the command line stay valid
            code = path.read_bytes()
            exec(compile(code, path, "exec", dont_inherit=True), module.__dict__)
        beside = _imported_beside(path, code)
    except ConfigError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        where = place_in_plugins(error) or path
        del sys.modules[name]
        missing = isinstance(error, ModuleNotFoundError) and "." not in (error.name or ".")  # else its package is there
        remedy = "install it" if missing else "fix it"
        raise ConfigError(f"plugin file {where} cannot be imported: {describe_error(error)}; {remedy}.") from error
    finally:
        Registry.plugin = None
    if Registry.total == before:
        del sys.modules[name]
        raise ConfigError(f"plugin file {path} registers nothing; put @mixer(...) above its class.")
    digest = hashlib.sha256(code)
    for file, content in sorted(beside.items()):
        digest.update(f"{file.relative_to(path.parent).as_posix()}\n".encode() + content)
    return digest.hexdigest()


def _imported_beside(path: Path, code: bytes) -> dict[Path, bytes]:
    """Return the files beside a plugin that its code imports, also through one another, with their content.

    Of a package these are all files. Raises ConfigError where another plugin brought a module of the same name.
    """
    folder = path.parent
    others = {Path(sys.modules[name].__file__ or "").parent for name in _loaded if name in sys.modules} - {folder}
    found: dict[Path, bytes] = {}
    waiting = [code]
    while waiting:
        for top in _imports(waiting.pop()) - {__package__}:  # a plugin may lie beside basecap itself
            place, files = _found_in(top), [folder / f"{top}.py", *(folder / top).rglob("*.py")]
            if place in others and any(file.is_file() for file in files):
                raise ConfigError(
                    f"plugin file {path} imports {top!r}, which another plugin has imported from {place}, not the one "
                    "beside it; rename one."
                )
            if place != folder:
                continue
            new = {file: file.read_bytes() for file in files if file.is_file() and file not in found}
            found |= new
            waiting += new.values()
    return found


def _imports(code: bytes) -> set[str]:
    """Return the top-level names of the modules that code imports by absolute names, also in its functions."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):  # a file of a package that nothing imports
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _found_in(top: str) -> Path | None:
    """Return the directory in which Python finds a top-level module or package, None when it finds no such file."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # made by hand, as __main__ may be
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:  # a package
        return real_path(Path(spec.submodule_search_locations[0])).parent
    return real_path(Path(spec.origin)).parent if spec.has_location and spec.origin else None


def plugin_digest(module: str) -> str:
    """Return the SHA-256 of the code that a plugin's module was loaded from, with what it imports beside it."""
    return _loaded[module]


def place_in_plugins(error: BaseException) -> str | None:
    """Return FILE:LINE, the last in a plugin file or one beside it, that an error came through or is in, if any."""
    files = [getattr(module, "__file__", None) for name, module in [*sys.modules.items()] if name.startswith(PLUGIN)]
    folders = {Path(file).parent for file in files if file}
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    near = [f"{file}:{line}" for file, line in places if Path(file).parent in folders]
    return near[-1].removesuffix(":None") if near else None

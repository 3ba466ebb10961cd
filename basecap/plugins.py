"""Plugins: Python files that register mixers, evaluations, tasks or sources of their own when they are imported."""

import ast
import contextlib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from basecap.errors import BasecapError, ConfigError, describe_error
from basecap.system.files import LARGEST, real_path
from basecap.system.foreign import read_file

#: Prefix of the module names of plugin files.
PLUGIN = "basecap_plugin_"
#: SHA-256 of the code that a plugin's module was loaded from, by its name: the files may change while a study runs.
_loaded: dict[str, str] = {}
#: Plugins by the modules beside them that they imported and that registered something.
_owners: dict[str, str] = {}


@dataclass
class _Loading:
    """A plugin file that is being imported: its module, its directory, and whether anything was registered since."""

    name: str
    folder: Path
    registers: bool = False


#: The plugin files that are being imported, the innermost last.
_loading: list[_Loading] = []


def owner(module: str) -> str:
    """Return the plugin that imported a module from beside itself, else the module."""
    return _owners.get(module, module)


def registering_module(module: str) -> str:
    """Return the owner of a module that registers something now, and note for the plugin being imported that one does.

    A registry calls this for each new entry.
    """
    if _loading:
        loading = _loading[-1]
        loading.registers = True
        top = module.partition(".")[0]
        if top != __package__ and not top.startswith(PLUGIN) and _found_in(top) == loading.folder:
            _owners[module] = loading.name
    return owner(module)


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
    loading = _Loading(name, path.parent)
    _loading.append(loading)
    try:
        with contextlib.chdir("."):  # the plugin may enter another directory; paths of the command line stay valid
            code = read_file(path, LARGEST)
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
        # Python ends the message of a syntax error with its place.
        words = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else describe_error(error)
        raise ConfigError(f"plugin file {where} cannot be imported: {words}; {remedy}.") from error
    finally:
        _loading.pop()
    if not loading.registers:
        del sys.modules[name]
        raise ConfigError(f"plugin file {path} registers nothing; put @mixer(...) above its class.")
    digest = hashlib.sha256(code)
    for file, content in sorted(beside.items()):
        digest.update(f"{file.relative_to(path.parent).as_posix()}\n".encode() + content)
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return a plugin file and the files beside it that its code imports."""
    return [path, *_imported_beside(path, read_file(path, LARGEST))]


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
            new = {file: read_file(file, LARGEST) for file in files if file.is_file() and file not in found}
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


@contextlib.contextmanager
def faults(what: str, kind: type[BasecapError] = ConfigError) -> Iterator[None]:
    """Raise `kind` for whatever other people's code may raise: "WHAT: ERROR (FILE:LINE); fix it.", the line if known.

    Errors of the system stay what they are, as their remedy is no change of the code.
    """
    try:
        yield
    except (BasecapError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = f" ({found})" if (found := place_in_plugins(error)) else ""
        raise kind(f"{what}: {describe_error(error)}{place}; fix it.") from error

"""Source `installed`: the text that every Python installation holds.

Prose is what people wrote to be read: docstrings, the topics of `pydoc`, the descriptions of packages. Python source
without its docstrings, and the C and C++ headers of packages, are domains of their own. What is installed differs
between machines, so the manifest names every file with its hash.
"""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePath

from basecap.data.hashes import digest
from basecap.data.sources._contract import Document, Part, Source, source, split_of
from basecap.errors import DataError

#: Characters of text per domain, and bytes of files that are opened for them.
CHARACTERS = {"prose": 8_000_000, "python": 3_000_000, "c": 3_000_000}
BYTES = {"prose": 48_000_000, "python": 5_000_000, "c": 4_000_000}

#: Characters of docstrings and bytes of files that say something; longer modules were written by programs, and files of
#: code are documents of their own, of which a bootstrap needs many.
SHORTEST_DOCSTRING, SHORTEST_FILE, LONGEST_FILE, LONGEST_MODULE = 100, 1_500, 4_000, 200_000

#: Folders of tests and of copies, which repeat what stands elsewhere.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "lib2to3"}

TOPICS = "pydoc_data/topics.py"
SUFFIXES = (".py", ".h", ".hpp", "METADATA")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@source("installed")
class Installed(Source):
    """Docstrings, Python source and C headers of this Python installation."""

    known_domains = tuple(CHARACTERS)
    reads = ()
    has_records = False

    def parts(self) -> list[Part]:
        """Return one part per domain: files in the order of the hashes of their names."""
        files = _files()
        modules = [path for path in files if path.suffix == ".py" and not path.match(TOPICS)]
        described = [path for path in files if path.name == "METADATA" or path.match(TOPICS)]
        found = {
            "prose": described + _up_to(BYTES["prose"], modules, LONGEST_MODULE),
            "python": _up_to(BYTES["python"], reversed(modules), LONGEST_FILE),
            "c": _up_to(BYTES["c"], (path for path in files if path.suffix in (".h", ".hpp")), LONGEST_FILE),
        }
        domains = [domain for domain in found if domain in (*self.config.train, *self.config.ood)]
        for domain in domains:
            if not found[domain]:
                raise DataError(f"this Python installation holds no file for domain {domain!r}; leave the domain out.")
        return [Part(domain, tuple(found[domain])) for domain in domains]

    def read(self, part: Part) -> Iterator[Document]:
        """Yield a document per file (and per topic of `pydoc`), split by its hash, up to the domain's size."""
        read = {"prose": _prose, "python": _without_docstrings, "c": _header}[part.name]
        left = CHARACTERS[part.name]
        for path, text in read(part.paths):
            yield Document(part.name, split_of(text), text, self.path_cluster(self._place_of(path)))
            left -= len(text)
            if left <= 0:
                return

    def name_of(self, path: Path) -> str:
        """Return the path below the packages, Python's headers or the standard library."""
        name, root = next((name, root) for name, root in _roots().items() if path.is_relative_to(root))
        return f"{name}/{path.relative_to(root).as_posix()}"

    def _place_of(self, path: Path) -> PurePath:
        """Return the path whose first part names a package, a module of the standard library or Python's headers."""
        root, first, *rest = self.name_of(path).split("/")
        return PurePath(first.partition("-")[0], *rest) if root != "headers" else PurePath(root, first, *rest)


@cache
def _roots() -> dict[str, Path]:
    """Return where an installation keeps its files; packages first, they may lie below the standard library."""
    names = {"packages": "purelib", "platform": "platlib", "headers": "include", "standard": "stdlib"}
    return {name: Path(sysconfig.get_path(key)) for name, key in names.items()}


def _files() -> list[Path]:
    """Return all files of text in the order of the hashes of their names."""
    found: dict[str, str] = {}
    for name, root in reversed(_roots().items()):
        for folder, folders, files in os.walk(root):
            folders[:] = [folder for folder in folders if folder not in SKIPPED]
            place = f"{name}{folder.removeprefix(str(root))}/"
            found |= {f"{folder}/{file}": place + file for file in files if file.endswith(SUFFIXES)}
    return [Path(path) for path, name in sorted(found.items(), key=lambda item: digest(item[1]))]


def _up_to(size: int, paths: Iterable[Path], longest: int) -> list[Path]:
    """Return the first files of a useful length that hold `size` bytes together."""
    found = []
    for path in paths:
        length = path.stat().st_size
        if SHORTEST_FILE <= length <= longest:
            found.append(path)
            size -= length
        if size <= 0:
            break
    return found


def _prose(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    seen: set[str] = set()
    for path in paths:
        content = _read(path)
        if path.name == "METADATA":
            texts = [content.partition("\n\n")[2]]
        elif path.match(TOPICS):
            yield from ((path, text) for text in _topics(content))
            continue
        else:
            texts = [text for text in _docstrings(content) if text not in seen]
            seen.update(texts)
        if any(texts):
            yield path, "\n\n".join(texts)


def _topics(content: str) -> list[str]:
    tree = _parsed(content)
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)] if tree else []
    return [text for table in tables for text in ast.literal_eval(table).values()]


def _docstrings(content: str) -> list[str]:
    tree = _parsed(content) if '"""' in content else None
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DEFINITIONS)] if tree else []
    return list(dict.fromkeys(text for text in found if text and len(text) >= SHORTEST_DOCSTRING))


def _without_docstrings(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        content = _read(path)
        tree = _parsed(content)
        if tree is None:
            continue
        lines = content.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
                first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
                lines[first:last] = [""] * (last - first)
        yield path, "".join(lines)


def _header(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    found = ((path, _read(path)) for path in paths)
    return ((path, content) for path, content in found if "generated" not in content[:500].lower())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _parsed(content: str) -> ast.Module | None:
    """Return the syntax tree, None for what this Python does not read (templates, tests of the parser)."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return None

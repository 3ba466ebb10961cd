"""Source `installed`: text that is installed with Python and with the packages that basecap needs.

The domain prose consists of docstrings and the topics of `pydoc`, python of Python source without docstrings, c of the
C and C++ headers of packages.

`installed.txt` lists the files to read, with a hash of each one's text on the machine where they were chosen
(`_reference.py`). They belong to the standard library and to packages of fixed versions (`constraints.txt`); files that
a build or a platform changes are left out, so that Python 3.11.7 and these packages give the same text everywhere. With
other versions the files of these names are read as they are and missing ones are skipped; `remark` counts the
differences, and the report shows it.
"""

import ast
import hashlib
import importlib.util
import io
import platform
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath

from basecap.data.sources._contract import Document, Part, Source, source
from basecap.errors import DataError

DOMAINS = ("prose", "python", "c")

#: Packages whose files are read; basecap or PyTorch requires each of them.
PACKAGES = ("mpmath", "networkx", "numpy", "scipy", "sympy", "torch")

#: Minimum number of characters of a docstring.
SHORTEST_DOCSTRING = 100

TOPICS = "standard/pydoc_data/topics.py"
REFERENCE = Path(__file__).with_name("installed.txt")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: Fields of syntax tree nodes that contain statements.
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@source("installed")
class Installed(Source):
    """Docstrings, Python source and C headers of this Python installation."""

    known_domains = DOMAINS
    reads = ()
    has_records = False

    def parts(self) -> list[Part]:
        """Return one part per domain: the files of `installed.txt` that exist; raises DataError when none does."""
        found = []
        for domain in (*self.config.train, *self.config.ood):
            paths = tuple(path for name in reference()[domain] if (path := path_of(name)) is not None)
            if not paths:
                raise DataError(f"this Python installation has no file for domain {domain!r}; leave the domain out.")
            found.append(Part(domain, paths))
        return found

    def read(self, part: Part) -> Iterator[Document]:
        """Yield a document per file (and per topic of `pydoc`), split by its hash."""
        seen: set[str] = set()
        for path in part.paths:
            name = self.name_of(path)
            if part.name == "c":
                texts = [text_of(path)]
            elif part.name == "python":
                texts = _without_docstrings(text_of(path))
            elif name == TOPICS:
                texts = _topics(text_of(path))
            else:
                new = [text for text in _docstrings_of(path) if text not in seen]
                seen.update(new)
                texts = ["\n\n".join(new)] if new else []
            for text in texts:
                yield Document(part.name, self.split_of(part.name, text), text, self.path_cluster(_place(name)))

    def name_of(self, path: Path) -> str:
        """Return "PACKAGE/PATH", with `standard` for the standard library."""
        name, root = next((name, root) for name, root in roots().items() if path.is_relative_to(root))
        return f"{name}/{path.relative_to(root).as_posix()}"

    def remark(self) -> str | None:
        """Return a remark with the number of files that differ from the reference, None if all are equal."""
        domains = (*self.config.train, *self.config.ood)
        wanted = {name: text for domain in domains for name, text in reference()[domain].items()}
        differ = sum((path := path_of(name)) is None or text_digest(path) != text for name, text in wanted.items())
        if not differ:
            return None
        return (
            f"the text differs from the reference manifest: {differ} of {len(wanted)} files are missing or changed; "
            f"compare only runs on this text, or {_remedy()}"
        )


def _remedy() -> str:
    """Return how to get the text of the reference: what differs here in the versions that the manifest begins with."""
    first = REFERENCE.read_text(encoding="utf-8").partition("\n")[0]
    wanted = dict(item.rsplit(" ", 1) for item in first.removeprefix("# ").split(", "))
    python = wanted.pop("Python")
    others = [f"{name}=={number}" for name, number in wanted.items() if _version_of(name) != number]
    steps = [f"create an environment with Python {python} (this is {platform.python_version()})"]
    steps = steps if platform.python_version() != python else []
    steps += [f"run pip install {' '.join(others)}"] if others else []
    return f"{' and '.join(steps or ['install these packages again'])}, then prepare the text again"


def _version_of(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


@cache
def reference() -> dict[str, dict[str, str]]:
    """Return the hash of each file's text, by domain and file name."""
    found: dict[str, dict[str, str]] = {}
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            held = found.setdefault(line[1:-1], {})
        elif not line.startswith((" ", "#")):
            folder = line
        elif line.startswith(" "):
            file, _, text = line.strip().rpartition(" ")
            held[f"{folder}/{file}"] = text
    return found


@cache
def roots() -> dict[str, Path]:
    """Return the directory of each package; packages first, as they may be below the standard library."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    roots = {name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None and spec.origin}
    return {**roots, "standard": Path(sysconfig.get_path("stdlib"))}


def path_of(name: str) -> Path | None:
    """Return the path of a file by its name in the manifest, None if it is not installed."""
    package, _, rest = name.partition("/")
    root = roots().get(package)
    return root / rest if root is not None and (root / rest).is_file() else None


def _place(name: str) -> PurePath:
    """Return the path whose folders define clusters; each module and package of the standard library is its own."""
    return PurePath(name.removeprefix("standard/").replace("torch/include/", "torch/", 1))


def text_of(path: Path) -> str:
    """Return a file's text with normalised line ends."""
    return path.read_text(encoding="utf-8", errors="replace")


def text_digest(path: Path) -> str:
    """Return eight hex digits of the SHA-256 of a file's text."""
    return hashlib.sha256(text_of(path).encode()).hexdigest()[:8]


def docstrings(content: str) -> list[str]:
    """Return the distinct docstrings of a module with at least SHORTEST_DOCSTRING characters."""
    tree = _parsed(content) if '"""' in content else None
    found = [ast.get_docstring(node) for node in _definitions(tree)] if tree else []
    return list(dict.fromkeys(text for text in found if text and len(text) >= SHORTEST_DOCSTRING))


@cache  # files are read for the tokenizer and again for the shards, and parsing takes most of the time
def _docstrings_of(path: Path) -> list[str]:
    return docstrings(text_of(path))


def _definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the nodes that can have a docstring, in the order of `ast.walk` but skipping expressions."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, DEFINITIONS):
            yield node
        for name in node._fields:
            if name in BLOCKS:
                waiting.extend(getattr(node, name))


def _topics(content: str) -> list[str]:
    tree = _parsed(content)
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)] if tree else []
    return [text for table in tables for text in ast.literal_eval(table).values()]


def _without_docstrings(content: str) -> list[str]:
    tree = _parsed(content)
    if tree is None:
        return []
    lines = list(io.StringIO(content))  # str.splitlines also splits at form feeds, which Python's parser does not count
    for node in _definitions(tree):
        if ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[first:last] = [""] * (last - first)
    return ["".join(lines)]


def _parsed(content: str) -> ast.Module | None:
    """Return the syntax tree, None for files that this Python cannot parse (templates, tests of the parser)."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return None

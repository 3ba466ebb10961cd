"""Source `installed`: text that comes with Python and with the packages that basecap needs, the same on any machine.

Prose is what people wrote to be read: docstrings and the topics of `pydoc`. Python source without its docstrings, and
the C and C++ headers of packages, are domains of their own.

`installed.txt` names the files that are read, with a hash of each one's text, as they are on the machine that chose
them (`_reference.py`). They come from the standard library and from packages of fixed versions (`constraints.txt`), and
those are left out that a build or a platform changes, so that Python 3.11.7 and these packages give the same text
everywhere. Elsewhere the files of these names are read as they are, those that are missing are passed over, and
`remark` says how many differ: a study runs with any versions, and its report does not claim the reference text.
"""

import ast
import hashlib
import importlib.util
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

from basecap.data.sources._contract import Document, Part, Source, source
from basecap.errors import DataError

DOMAINS = ("prose", "python", "c")

#: Packages whose files are read; each is needed by basecap or by PyTorch.
PACKAGES = ("mpmath", "networkx", "numpy", "scipy", "sympy", "torch")

#: Characters of docstrings that say something.
SHORTEST_DOCSTRING = 100

TOPICS = "standard/pydoc_data/topics.py"
REFERENCE = Path(__file__).with_name("installed.txt")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: Fields of a syntax tree that hold statements, or what holds statements.
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@source("installed")
class Installed(Source):
    """Docstrings, Python source and C headers of this Python installation."""

    known_domains = DOMAINS
    reads = ()
    has_records = False

    def parts(self) -> list[Part]:
        """Return one part per domain: the files of the reference that are installed."""
        found = []
        for domain in (*self.config.train, *self.config.ood):
            paths = tuple(path for name in reference()[domain] if (path := path_of(name)) is not None)
            if not paths:
                raise DataError(f"this Python installation holds no file for domain {domain!r}; leave the domain out.")
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
        """Return the package, or `standard`, and the path below it."""
        name, root = next((name, root) for name, root in roots().items() if path.is_relative_to(root))
        return f"{name}/{path.relative_to(root).as_posix()}"

    def remark(self) -> str | None:
        """Return how many of the files differ from the reference, None when none does."""
        domains = (*self.config.train, *self.config.ood)
        wanted = {name: text for domain in domains for name, text in reference()[domain].items()}
        differ = sum((path := path_of(name)) is None or text_digest(path) != text for name, text in wanted.items())
        if not differ:
            return None
        return f"the text differs from the reference manifest: {differ} of {len(wanted)} files are missing or changed"


@cache
def reference() -> dict[str, dict[str, str]]:
    """Return by domain the names of the files to read, with the hash of each one's text."""
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
    """Return where the files of each package lie; packages first, they may lie below the standard library."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    roots = {name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None and spec.origin}
    return {**roots, "standard": Path(sysconfig.get_path("stdlib"))}


def path_of(name: str) -> Path | None:
    """Return the file of this name, None where it is not installed."""
    package, _, rest = name.partition("/")
    root = roots().get(package)
    return root / rest if root is not None and (root / rest).is_file() else None


def _place(name: str) -> PurePath:
    """Return the path whose folders are clusters: modules of the standard library stand alone, as do its packages."""
    return PurePath(name.removeprefix("standard/").replace("torch/include/", "torch/", 1))


def text_of(path: Path) -> str:
    """Return a file's text, with the line ends that every platform reads."""
    return path.read_text(encoding="utf-8", errors="replace")


def text_digest(path: Path) -> str:
    """Return eight hex digits of the SHA-256 of a file's text."""
    return hashlib.sha256(text_of(path).encode()).hexdigest()[:8]


def docstrings(content: str) -> list[str]:
    """Return the docstrings of a module that say something, each once."""
    tree = _parsed(content) if '"""' in content else None
    found = [ast.get_docstring(node) for node in _definitions(tree)] if tree else []
    return list(dict.fromkeys(text for text in found if text and len(text) >= SHORTEST_DOCSTRING))


@cache  # the text is read for the tokenizer and again for the shards; parsing takes most of the time
def _docstrings_of(path: Path) -> list[str]:
    return docstrings(text_of(path))


def _definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield what may have a docstring in the order of `ast.walk`, without a look at expressions, which hold none."""
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
    lines = content.splitlines(keepends=True)
    for node in _definitions(tree):
        if ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[first:last] = [""] * (last - first)
    return ["".join(lines)]


def _parsed(content: str) -> ast.Module | None:
    """Return the syntax tree, None for what this Python does not read (templates, tests of the parser)."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return None

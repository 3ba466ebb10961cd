"""The rules of this code base, one test each. Exceptions are listed with their reason; the lists may only shrink."""

import ast
import functools
import graphlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._architectures import OWN

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "basecap"

#: Rooms from the ground up: a room imports from rooms before it, never from those after it. A tuple is one floor:
#: its rooms do not import each other, except downwards.
FLOORS = (
    ("errors", "names", "version"),
    ("options", "system"),
    ("plugins",),
    ("registry",),
    ("records",),
    ("tasks",),
    ("ops",),
    ("mixers",),
    ("models",),
    ("data",),
    ("train",),
    ("evals",),
    ("analysis",),
    ("report",),
    ("testing",),
    ("study",),
    ("plan",),
    ("run",),
    ("bench", "families", "hf"),
    ("api", "cli"),
    ("__init__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

#: Rooms that may use a floor above them, with the reason.
UPWARD: dict[tuple[str, str], str] = {}

#: Rooms that must work for an architecture nobody has thought of yet.
NAMELESS = ("train", "evals", "analysis", "report", "study", "plan", "run", "records", "cli", "models")

#: Imports that close a circle: (module, imported module) -> reason.
CIRCLES: dict[tuple[str, str], str] = {}

#: Functions that may be longer or take more arguments: (file, function) -> reason.
LONG: dict[tuple[str, str], str] = {}
MANY: dict[tuple[str, str], str] = {
    ("basecap/cli/commands.py", "run"): "an argument is an option of the command",
    ("basecap/cli/commands.py", "eval_"): "an argument is an option of the command",
    ("basecap/cli/bench.py", "bench_models"): "an argument is an option of the command",
    ("basecap/cli/bench.py", "bench_generate"): "an argument is an option of the command",
    ("basecap/cli/generate.py", "generate"): "an argument is an option of the command",
    ("basecap/hf/model.py", "forward"): "transformers calls it with these keywords",
    ("basecap/ops/top1_chunk/__init__.py", "top1_chunk"): "the public kernel: tensors, packing and choice are one call",
    ("basecap/ops/top1_chunk/cache.py", "top1_chunk_step"): "the same call for one token",
    ("basecap/ops/top1_chunk/cache.py", "top1_chunk_further"): "the same call for further tokens",
}

#: Public classes that have the name of another one: name -> reason.
SAME_NAME: dict[str, str] = {}

#: Archaic or inverted English, which messages, docstrings, comments and pages do not use.
ARCHAIC = re.compile(
    r"\b(begun|bespoke|betwixt|for good|for want of|gives? back|heed(ed|s)?|hitherto|in vain|lest|mend(s|ed)?|nobody"
    r"|nought|of its own accord|perchance|perhaps|save for|so (is|are) (the|its|their|that|those)|speaks? of|stood"
    r"|thence|therein|thereof|thither|thus far|told|unto|upon|what stands|whence|wherein|whereof|wherever it|whither"
    r"|wholly|(is|are) grown|once more|nothing but|as it were)\b",
    re.IGNORECASE,
)

#: Phrases that readers had to read twice: inversions, and words that leave open what they stand for.
RIDDLES = re.compile(
    r"\b(none for none|(have|has) none|not to grow|no other|than which|of which (the|each|every)|as that does"
    r"|every so many|many-th|for all at once|what they are of|one's own|in some of the draws|in truth"
    r"|nor (am|are|can|could|did|do|does|had|has|have|is|was|were|will)|what [`\w]+ raises, "
    r"|held-out less|, less what|less (its|their) mean)\b",
    re.IGNORECASE,
)


@functools.cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    """Return the syntax tree of every Python file in a folder; every process that collects tests imports this file."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a file."""
    return tuple(ast.walk(tree))


def relative(path: Path) -> str:
    """Return the path below the repository."""
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    """Return the part of the package a file belongs to; what `python -m basecap` runs is the command line."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__main__", "cli")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a file."""
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled by Triton or Numba: the sizes of ordinary code mean little there."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("triton" in decorator or decorator in ("kernel", "inlined") for decorator in decorators)


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (room, line) for every import of the package itself."""
    for node in nodes(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "basecap":
                names = [f"basecap.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "basecap":
                yield (parts[1] if len(parts) > 1 and parts[1] in FLOOR else "__init__"), node.lineno


def test_every_room_has_a_floor():
    assert {room(path) for path in trees(PACKAGE)} <= set(FLOOR)


def test_contributing_lists_the_rooms_in_the_order_of_imports():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(int(number), name) for number, name in rows]
    assert listed == [(number, name) for number, rooms in enumerate(FLOORS, 1) for name in rooms]


def test_imports_point_downwards():
    wrong = [
        f"{relative(path)}:{line} imports {target}"
        for path, tree in trees(PACKAGE).items()
        for target, line in imports(tree)
        if FLOOR[target] > FLOOR[room(path)] and (room(path), target) not in UPWARD
    ]
    assert not wrong, "a lower room imports a higher one:\n" + "\n".join(wrong)


def test_private_names_stay_in_their_package():
    wrong = []
    for path, tree in trees(PACKAGE).items():
        package = path.relative_to(ROOT).parts[:-1]
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                parts = tuple(name.split("."))
                private = [n for n, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")]
                # a module may use the private modules beside it and above it, but no private name of another module
                in_module = bool(private) and PACKAGE.parent.joinpath(*parts[: private[0]]).with_suffix(".py").is_file()
                if parts[0] == "basecap" and private and (in_module or parts[: private[0]] != package[: private[0]]):
                    wrong.append(f"{relative(path)}:{node.lineno} imports {name}")
    assert not wrong, "import these from the face of their package:\n" + "\n".join(wrong)


def test_modules_import_each_other_in_no_circle():
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in trees(PACKAGE)}
    names = {name.removesuffix(".__init__"): path for path, name in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in nodes(trees(PACKAGE)[path]):  # an import inside a function or for types is an import
            if isinstance(node, ast.ImportFrom) and node.module in names:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & names.keys() or {node.module}
        graph[name] = found - {other for one, other in CIRCLES if one == name}
    try:
        order = [*graphlib.TopologicalSorter(graph).static_order()]
    except graphlib.CycleError as error:
        pytest.fail(f"these modules import each other: {' <- '.join(error.args[1])}")
    assert len(order) == len(names)


def test_general_rooms_name_no_architecture():
    names = OWN.keys() - {"transformer++"}  # the default reference of every comparison
    wrong = []
    for path, tree in trees(PACKAGE).items():
        if room(path) not in {name.removesuffix(".py") for name in NAMELESS} or "backbones" in path.parts:
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                wrong.append(f"{relative(path)}:{node.lineno} {node.value!r}")
    assert not wrong, "these names belong in mixers/ and in studies:\n" + "\n".join(wrong)


def test_files_can_be_read_in_one_sitting():
    limits = {path: 450 if path.name.startswith("kernels") else 400 for path in trees(PACKAGE)}
    wrong = [
        f"{relative(path)} has {lines} lines"
        for path, limit in limits.items()
        if (lines := len(path.read_text().splitlines())) > limit
    ]
    assert not wrong, "too long:\n" + "\n".join(wrong)


def test_functions_are_short():
    wrong = []
    for path, tree in trees(PACKAGE).items():
        for function in functions(tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            limit = 150 if is_kernel(function) else 60
            if length > limit and (relative(path), function.name) not in LONG:
                wrong.append(f"{relative(path)}:{function.lineno} {function.name} has {length} lines")
    assert not wrong, "too long:\n" + "\n".join(wrong)


def test_functions_take_few_arguments():
    wrong = []
    for path, tree in trees(PACKAGE).items():
        for function in functions(tree):
            arguments = function.args
            names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            if count > 8 and not is_kernel(function) and (relative(path), function.name) not in MANY:
                wrong.append(f"{relative(path)}:{function.lineno} {function.name} takes {count}")
    assert not wrong, "too many arguments:\n" + "\n".join(wrong)


def test_public_functions_swallow_no_keywords():
    wrong = [
        f"{relative(path)}:{function.lineno} {function.name}"
        for path, tree in trees(PACKAGE).items()
        for function in functions(tree)
        if function.args.kwarg is not None and not function.name.startswith("_")
    ]
    assert not wrong, "spell the keywords out:\n" + "\n".join(wrong)


#: The file that reads the environment: how the process was started.
ENVIRONMENT = PACKAGE / "system" / "environment.py"


def test_no_environment_variable_changes_a_number():
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in trees(PACKAGE).items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and path != ENVIRONMENT
    ]
    assert not wrong, "options are arguments, not environment variables:\n" + "\n".join(wrong)


@pytest.mark.parametrize("banned", ["manual_seed", "default_rng", "seed"])
def test_no_global_random_state(banned: str):
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in trees(PACKAGE).items()
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) == banned
        and ast.unparse(node.func) in {f"torch.{banned}", f"np.random.{banned}", f"random.{banned}"}
        and (banned != "default_rng" or not node.args)
    ]
    assert not wrong, "pass a generator:\n" + "\n".join(wrong)


def test_no_block_of_code_stands_twice():
    seen: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    total = 0
    for path in trees(PACKAGE):
        lines = [line.strip() for line in path.read_text().splitlines()]
        code = [
            (number, line)
            for number, line in enumerate(lines, 1)
            if line and not line.startswith(("#", "from", "import"))
        ]
        total += len(code)
        for start in range(len(code) - 7):
            block = tuple(line for _, line in code[start : start + 8])
            seen[block].append((path, code[start][0]))
    twice = {
        (path, number) for places in seen.values() if len({path for path, _ in places}) > 1 for path, number in places
    }
    share = len(twice) / total
    places = sorted(f"{relative(path)}:{number}" for path, number in twice)[:40]
    assert share < 0.03, f"{share:.1%} of the lines begin a block that stands in another file too:\n" + "\n".join(
        places
    )


def test_a_public_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(PACKAGE).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{relative(path)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    wrong = [f"{name}: {', '.join(found)}" for name, found in twice.items() if name not in SAME_NAME]
    assert not wrong, "rename all but one of each:\n" + "\n".join(wrong)
    assert SAME_NAME.keys() <= twice.keys(), "remove the names from SAME_NAME that one class has"


def test_there_is_one_language_model():
    found = [
        f"{relative(path)} {node.name}"
        for path, tree in trees(PACKAGE).items()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, ast.FunctionDef)
        and function.name == "forward"
        and len(function.args.args) > 1
        and "tokens" in function.args.args[1].arg
    ]
    assert found == ["basecap/models/language_model.py LanguageModel", "basecap/models/ngrams.py NgramEmbedding"]


#: What may not run: both branches of an `if`, handlers of errors, functions inside a test.
CONDITIONAL = (
    ast.If,
    ast.IfExp,
    ast.Match,
    ast.ExceptHandler,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
)


def unconditional(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below `node` that no condition skips."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, CONDITIONAL):
            yield child
            yield from unconditional(child)


def asserts(node: ast.AST) -> bool:
    """Whether a node is an assertion: a statement, or a call of a function that asserts."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")).lstrip("_")
        return name in ("raises", "gradcheck", "opcheck") or name.startswith("assert_")
    return isinstance(node, ast.Assert)


def collected(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a file that stand in no other function: to look for those takes seconds."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for holder in (tree, *classes) for node in holder.body if isinstance(node, ast.FunctionDef)]


def test_every_test_asserts():
    wrong = [
        f"{relative(path)}:{function.lineno} {function.name}"
        for path, tree in trees(ROOT / "tests").items()
        for function in collected(tree)
        if function.name.lstrip("_").startswith(("test_", "assert_"))
        and not any(asserts(node) for node in unconditional(function))
    ]
    assert not wrong, "these tests may pass without an assertion; assert outside any `if`:\n" + "\n".join(wrong)


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings and comments of a Python file, of every line of another file."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            yield from enumerate(token.string.splitlines(), token.start[0])


def test_words_are_plain():
    inside = [path for kind in ("md", "yaml", "html") for path in PACKAGE.rglob(f"*.{kind}")]
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "results").rglob("*.md"),
        ROOT / "tests/README.md",
    ]
    lines = [(path, number, text) for path in [*trees(PACKAGE), *inside, *pages] for number, text in words_of(path)]
    lines += [
        (path, function.lineno, function.name.replace("_", " "))
        for path, tree in trees(ROOT / "tests").items()
        for function in functions(tree)
        if function.name.startswith("test_")
    ]
    wrong = [
        f"{relative(path)}:{number} {word[0]!r}"
        for path, number, text in lines
        for pattern in (ARCHAIC, RIDDLES)
        for word in pattern.finditer(text)
    ]
    assert len(pages) > 20 and not wrong, "write plain English:\n" + "\n".join(wrong)


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of a page without tables, code, pictures and the targets of links."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("|", "```", "![", "    ")):
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def test_prose_of_pages_wraps_at_120_columns():
    places = [place for place in ROOT.iterdir() if place.name not in {".venv", ".git", "runs", "build"}]
    pages = [page for place in places for page in ([place] if place.suffix == ".md" else place.rglob("*.md"))]
    wrong = [f"{relative(page)}:{number}" for page in pages for number, line in prose_of(page) if len(line) > 120]
    assert len(pages) > 30 and not wrong, "break these lines at 120 columns:\n" + "\n".join(wrong)

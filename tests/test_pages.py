"""Commands on the pages are ones that this version runs: names of options, studies, scales, settings and mixers."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from basecap.cli import app
from basecap.cli.lists import is_task
from basecap.plugins import load_plugin
from basecap.study.config import load_study, select, with_named

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").rglob("*.md")),
    *sorted((ROOT / "basecap/ops").rglob("README.md")),
]
COMMAND = re.compile(r"(?:\.venv/bin/)?basecap |torchrun .*-m basecap\.cli ")
MODULE = re.compile(r"python -m ([a-z_]+(?:\.[a-z_0-9]+)*)")
#: What a reader fills in: parts of a command, and names.
PLACEHOLDER = re.compile(r"\.\.\.|\$")
NAME = re.compile(r"[A-Z]{3,}")


def _spans(text: str) -> Iterator[str]:
    """Yield the lines of blocks of commands, joined where they go on, and what stands between backticks."""
    parts = re.split(r"^```(.*)\n", text, flags=re.MULTILINE)  # text, fence, text, fence, ...
    for number, part in enumerate(parts[::2]):
        if number % 2 == 0:
            yield from (re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", part))
        elif parts[2 * number - 1] in ("", "console"):
            yield from re.sub(r"\\\n\s*", "", part).splitlines()


def _commands(page: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of every command of basecap on a page."""
    for span in _spans(page.read_text(encoding="utf-8")):
        for part in re.split(" && |; ", span):
            found = COMMAND.match(part.strip())
            if found and not PLACEHOLDER.search(part):
                yield tuple(shlex.split(part.strip()[found.end() :], comments=True))


def _parsed(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of a command; raises what a reader would see."""
    command, words = typer.main.get_command(app), list(arguments)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    if not words:  # a command by its name alone
        return {}
    with command.make_context("basecap", words) as context:
        return context.params


COMMANDS = [(page, words) for page in PAGES for words in dict.fromkeys(_commands(page))]


@pytest.mark.parametrize(
    "page, words", COMMANDS, ids=[f"{page.relative_to(ROOT)}: {shlex.join(words)[:60]}" for page, words in COMMANDS]
)
def test_commands_are_valid(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    parameters = _parsed(words)
    plugins = parameters.get("plugin") or []
    if not all(plugin.exists() for plugin in plugins):
        assert all(plugin.name in page.read_text(encoding="utf-8") for plugin in plugins)
        return
    for plugin in plugins:
        load_plugin(plugin)
    study, only = parameters.get("study") or "quickstart", parameters.get("only") or parameters.get("use") or []
    if is_task(study) or any(NAME.match(name) for name in (study, *only)) or study == "mine.yaml":
        return
    config = load_study(study, parameters.get("settings") or [], parameters.get("scale"))
    assert select(with_named(config, only), only)


def test_modules_are_there():
    named = {name for page in PAGES for name in MODULE.findall(page.read_text(encoding="utf-8"))} - {"pip", "venv"}
    assert named and all(importlib.util.find_spec(name) for name in named)


def test_the_walk_of_a_study_names_functions_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walk = page.partition("## The walk of a study\n")[2].partition("\n## ")[0]
    steps = re.findall(r"`([\w/]+\.py)`,\s+`([\w.]+)`", walk)
    missing = [(file, name) for file, name in steps if not _defines(ROOT / "basecap" / file, name)]
    assert len(steps) > 10 and not missing


def _defines(file: Path, name: str) -> bool:
    name = name.rpartition(".")[2]
    pattern = rf"^\s*(def|class) {name}\b|^{name}\b.* = "
    return file.is_file() and re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE) is not None

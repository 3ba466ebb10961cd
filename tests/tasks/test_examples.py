"""What `basecap data inspect` shows of a task, what docs/tasks.md promises, and a user's tasks."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import ConfigError
from basecap.plugins import load_plugin
from basecap.tasks import TASKS, build_task, inspect_task, task

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")

OWN = """
import numpy as np
from basecap.tasks import Role, Task, task

@task("echo", source="mine", summary="say the first token again")
class Echo(Task):
    axes = ("length",)
    vocabulary = 10

    def grid(self):
        return ({"length": 64},)

    def make(self, draws, canvas):
        canvas.inputs[:] = draws.below("tokens", self.length, 10)
        canvas.ask(np.array([[self.length - 1]]), canvas.inputs[:, :1], 0)

    def solve(self, inputs, asked):
        return {place: frozenset({int(inputs[0])}) for place in asked.tolist()}
"""


def test_every_token_role_and_target_is_shown_within_the_width():
    for name in TASKS.names():
        text = inspect_task(name, [], 1, 100)
        lines = text.plain.splitlines()
        first = lines.index("example 0")
        found = build_task(name).instances(0, [0])
        shown = [word for line in lines[first:] if line.startswith("tokens") for word in line.split()[1:]]
        assert list(map(int, shown)) == found.inputs[0].tolist()
        assert all(len(line) <= 100 for line in lines[first:] if line.startswith(("tokens", "roles", "target")))
        targets = found.targets[0][found.targets[0] >= 0].tolist()
        asked = [word for line in lines[first:] if line.startswith("target") for word in line.split()[1:]]
        assert [int(word.strip("()")) for word in asked] == targets


def test_roles_have_colours_and_regions_their_values():
    text = inspect_task("mqar-position-robustness", ["vocab=100"], 1, 80)
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert (styles["k0"], styles["v0"], styles["q0"]) == ("blue", "green", "bold magenta")
    assert "(region 4)" in text.plain
    assert "in brackets" in inspect_task("mqar-k2v2", ["closing=true"], 1, 80).plain


def test_a_long_example_is_cut_off():
    assert "... 3,584 more tokens" in inspect_task("passkey", ["length=4096"], 1, 100).plain


def test_answers_that_the_context_does_not_determine_are_counted():
    small = ["vocab=128", "length=32", "pairs=8"]
    said = inspect_task("mqar-shuffle", ["mode=paper", *small], 1, 100).plain
    share, best = map(float, re.findall(r"([\d.]+) %", said))
    assert 8 < share < 20 and 100 - share < best < 100 - share / 3
    assert "not determined" not in inspect_task("mqar-shuffle", small, 1, 100).plain
    assert "not determined" not in inspect_task("mqar-position-robustness", [], 1, 100).plain


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="does not have the form option=value"):
        inspect_task("mqar", ["pairs"], 1, 80)
    with pytest.raises(ConfigError, match=r"--set 'pairs=\[': the value is not valid YAML"):
        inspect_task("mqar", ["pairs=["], 1, 80)


def test_the_example_on_the_page_runs_and_names_are_right():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    table = PAGE[PAGE.index("| family |") : PAGE.index("**Modes.**")]
    named = set(re.findall(r"`([a-z0-9-]+)`", table)) | set(re.findall(r"`((?:mqar|zoology|mad)[a-z0-9-]*)`", PAGE))
    assert all(build_task(name) for name in named)
    families = {entry.family for entry in TASKS._entries.values()}
    assert families == {TASKS.get(name).family for name in named if name in TASKS.names()}


def test_a_task_of_ones_own_is_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    plugin = tmp_path / "echo_task.py"
    plugin.write_text(OWN)
    load_plugin(plugin)
    echo = build_task("echo", {"length": 8})
    found = echo.instances(0, range(5))
    assert np.array_equal(found.targets[:, -1], found.inputs[:, 0]) and echo.cell == {"length": 8}
    monkeypatch.delitem(sys.modules, "basecap_plugin_echo_task")
    with pytest.raises(ConfigError, match=r"is not a subclass of basecap\.tasks\.Task"):
        task("wrong", source="mine", summary="no task")(dict)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("canvas.ask(", "canvas.asks(", 15, "cannot be shown: AttributeError: 'Canvas' object has no attribute 'asks'"),
        ("int(inputs[0])", "int(inputs[-99])", 18, "cannot be shown: IndexError: index -99 is out of bounds"),
        (
            "    def make(",
            "    def check(self):\n        1 / 0\n\n    def make(",
            14,
            "cannot be built: ZeroDivisionError",
        ),
    ],
)
def test_a_task_of_ones_own_that_fails_is_named_with_its_line(old, new, line, words, tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    plugin = tmp_path / f"failing_task_{line}.py"
    plugin.write_text(OWN.replace(old, new))
    load_plugin(plugin)
    with pytest.raises(ConfigError) as failed:
        inspect_task("echo", [], 1, None)
    assert str(failed.value).startswith(f"task 'echo' {words}")
    assert str(failed.value).endswith(f" ({plugin}:{line}); fix it.")

"""What the README shows works as shown."""

import re
import tomllib
from pathlib import Path

import pytest
from torch import nn

from basecap import mixers
from basecap.mixers import Mixer
from basecap.plugins import load_plugin
from basecap.testing.check_mixer import check_mixer
from basecap.testing.new_mixer import write_mixer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "file", "names"),
    [
        ("README.md", "running_mean.py", ["running-mean"]),
        ("docs/mixers.md", "gated_average.py", ["gated-average", "gated-average w/o gate"]),
    ],
)
def test_the_example_mixers_pass_the_conformance_suite(page, file, names, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(rf"```python\n(# {re.escape(file)}\n.*?)```", text, flags=re.DOTALL)
    plugin = tmp_path / file
    plugin.write_text(code)
    load_plugin(plugin)
    for name in names:
        report = check_mixer(name)
        assert report.checks and not report.failures, report.failures


def test_the_mixer_of_check_new_is_that_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.delitem(mixers.ARCHITECTURES._entries, "running-mean", raising=False)  # of the test above
    assert write_mixer(tmp_path / "running_mean.py") == "running-mean"
    assert f"```python\n{(tmp_path / 'running_mean.py').read_text()}```" in README


@pytest.mark.parametrize("page", ["README.md", "basecap/ops/top1_chunk/README.md"])
def test_the_examples_of_the_kernels_run(page):
    code = re.findall(
        r"```python\n(import torch\n[^`]*top1_chunk\([^`]*)```", (ROOT / page).read_text(encoding="utf-8")
    )
    held = {}
    for block in code:
        exec(block, held)
    assert len(code) == 1 and all(held[name].grad.isfinite().all() for name in ("q", "k", "v"))


def test_the_page_on_mixers_names_every_part_of_one():
    text = (ROOT / "docs/mixers.md").read_text(encoding="utf-8")
    parts = [name for name in vars(Mixer) if not name.startswith("_") and name not in vars(nn.Module)]
    assert parts and all(f"`{part}" in text or f"def {part}(" in text for part in parts)
    for name in ("normal", "uniform", "constant", "values", "orthogonal", "residual_std"):
        assert name in text and callable(getattr(mixers, name))


def test_every_linked_file_exists_and_every_page_is_linked():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "tests" / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "results").rglob("README.md"),
    ]
    for page in pages:
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        assert all((page.parent / link).exists() for link in links), page
    assert all(f"](docs/{page.name})" in README for page in (ROOT / "docs").glob("*.md"))


def test_lines_of_the_readme_are_short():
    assert all(len(line) <= 125 for line in README.splitlines())


def test_the_two_commands_and_pip_are_in_it():
    assert "make run" in README and "make test" in README and "pip install -c constraints.txt" in README


def test_the_licence_is_there_in_full():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text

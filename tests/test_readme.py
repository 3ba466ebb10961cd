"""What the README shows works as shown."""

import re
import tomllib
from pathlib import Path

from basecap.registry import load_plugin
from basecap.testing.check_mixer import check_mixer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_mixer_passes_the_conformance_suite(tmp_path):
    (code,) = re.findall(r"```python\n(# running_mean\.py\n.*?)```", README, flags=re.DOTALL)
    plugin = tmp_path / "running_mean.py"
    plugin.write_text(code)
    load_plugin(plugin)
    report = check_mixer("running-mean")
    assert report.checks and not report.failures, report.failures


def test_every_file_named_in_it_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)


def test_the_two_commands_and_pip_are_in_it():
    assert "make run" in README and "make test" in README and "pip install -c constraints.txt" in README


def test_the_licence_is_there_in_full():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text

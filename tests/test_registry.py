"""Registries: entries of installed packages, and what is wrong with a package."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from basecap.errors import ConfigError
from basecap.registry import Registry


def install(site: Path, version: str, text: str) -> Path:
    """Make `site` hold the package fancy-mixers, whose one module declares itself; return the module's file."""
    about, module = site / "fancy_mixers.dist-info", site / "fancy_mixers.py"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fancy-mixers\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[basecap.mixers]\nfancy = fancy_mixers\n")
    module.write_text(text)
    return module


def test_a_package_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path, "0.1", "1 / 0\n").parent)
    with pytest.raises(ConfigError, match=r"^package fancy-mixers cannot be imported: ZeroDivisionError: .*uninstall"):
        Registry("mixer", "basecap.mixers", "mixers").names()


@pytest.mark.parametrize("name", ["", " ", "two\nlines"])
def test_a_name_that_no_table_can_show_is_refused(name):
    with pytest.raises(ConfigError, match=r"^mixer .* \(.*registry\.py:\d+\) needs a name for tables; give one line"):
        Registry("mixer", "basecap.api").add(name, 1, Registry)


def test_a_class_of_a_notebook_takes_the_place_of_an_earlier_one(monkeypatch):
    session = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    registry: Registry[int] = Registry("mixer", "basecap.api")
    for number in (1, 2):  # a cell that runs twice
        exec("class Own: pass", vars(session))
        registry.add("own", number, session.Own)
    assert registry.get("own") == 2 and registry.origin("own") == "a cell or a prompt"
    with pytest.raises(
        ConfigError, match=r"'own' is registered twice: a cell or a prompt and .*registry\.py:\d+; rename one"
    ):
        registry.add("own", 3, Registry)

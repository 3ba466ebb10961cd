"""A run goes on with what it was begun with."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from basecap.errors import ConfigError, DataError
from basecap.mixers import ARCHITECTURES
from basecap.models.config import model_config
from basecap.records import StudyRecords
from basecap.run.provenance import refuse_other_plugins, sources
from basecap.system.files import write_json
from tests.records.made_up import run_info
from tests.test_registry import install

PACKAGED = """
from basecap.mixers import mixer
from basecap.mixers.attention import Attention

@mixer("packaged", backbone="transformer++", paper="none", summary="from a package")
class Packaged(Attention):
    pass
"""


def test_an_architecture_that_no_plugin_defines_any_more_is_another(tmp_path):
    model = model_config("transformer++", hidden=16, vocab=257, layers=1)
    records = StudyRecords(tmp_path).run("mine", 0)
    records.write_info(run_info("mine"))
    assert refuse_other_plugins(records, model) is None
    records.write_info(run_info("mine", plugins={"0" * 64: "mine.py"}))
    with pytest.raises(ConfigError, match=r"another version of mine\.py"):
        refuse_other_plugins(records, model)


@pytest.mark.parametrize("plugins", [5, ["mine.py"], {"mine.py": 5}])
def test_a_damaged_record_of_plugins_is_named(tmp_path, plugins):
    records = StudyRecords(tmp_path).run("mine", 0)
    write_json(records.path / "run.json", run_info("mine").row() | {"plugins": plugins})
    with pytest.raises(DataError, match=r"run\.json is damaged at 'plugins"):
        refuse_other_plugins(records, model_config("transformer++", hidden=16, vocab=257, layers=1))


@pytest.fixture
def packaged(tmp_path, monkeypatch) -> Iterator[Path]:
    """Install a package of one mixer; return its module."""
    ARCHITECTURES.names()
    module = install(tmp_path / "site", "0.1", PACKAGED)
    monkeypatch.syspath_prepend(module.parent)
    monkeypatch.setattr(ARCHITECTURES, "_entry_points", ())
    monkeypatch.setattr(ARCHITECTURES, "_discovered", False)
    assert "packaged" in ARCHITECTURES.names()
    yield module
    del sys.modules[module.stem]
    for held in (ARCHITECTURES._entries, ARCHITECTURES._defined_by, ARCHITECTURES._modules):
        held.pop("packaged", None)


def test_another_version_of_a_package_is_refused(packaged, tmp_path):
    model = model_config("packaged", hidden=16, vocab=257, layers=1)
    records = StudyRecords(tmp_path).run("packaged", 0)
    records.write_info(run_info("packaged", plugins=sources(model)))
    assert list(records.info().plugins.values()) == ["fancy-mixers 0.1"]
    assert refuse_other_plugins(records, model) is None
    refused = r"packaged-s0 was trained with fancy-mixers 0\.1, not with what is installed; install that one"
    packaged.write_text(PACKAGED + "# changed")
    with pytest.raises(ConfigError, match=refused):
        refuse_other_plugins(records, model)
    install(packaged.parent, "0.2", PACKAGED)
    with pytest.raises(ConfigError, match=refused):
        refuse_other_plugins(records, model)
    install(packaged.parent, "0.1", PACKAGED)
    assert refuse_other_plugins(records, model) is None
    ARCHITECTURES._entries.pop("packaged")
    with pytest.raises(ConfigError, match=refused):
        refuse_other_plugins(records, model)

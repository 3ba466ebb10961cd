"""The lists name everything that a study can name."""

import pytest

from basecap.cli.lists import CATALOGUES
from basecap.data.sources import SOURCES
from basecap.errors import ConfigError
from basecap.tasks import build_task
from basecap.train.config import TrainConfig


def test_every_source_is_listed():
    assert {row["source"] for row in CATALOGUES["domains"](False)} == set(SOURCES.names())


def test_what_a_plugin_cannot_say_of_itself_is_named(monkeypatch):
    def fails(self, domain=None):
        return 1 / 0

    monkeypatch.setattr(type(build_task("mqar")), "grid", fails)
    with pytest.raises(
        ConfigError, match=r"^task 'mqar.*' cannot list its cells: ZeroDivisionError: division by zero;"
    ):
        CATALOGUES["tasks"](False)
    monkeypatch.setattr(SOURCES.get("installed"), "about", fails)
    with pytest.raises(ConfigError, match=r"^source 'installed' cannot describe '.*': ZeroDivisionError: division by"):
        CATALOGUES["domains"](False)


def test_every_key_of_a_study_is_listed_with_its_default_and_meaning():
    rows = {row["key"]: row for row in CATALOGUES["settings"](False)}
    assert {f"train.{name}" for name in TrainConfig.model_fields} <= rows.keys()
    assert {
        "name",
        "seeds",
        "reference_seeds",
        "gap.cost",
        "gap.from",
        "architectures",
        "architectures[].layers[].use",
        "data.path",
        "task.train",
        "published.values[].value",
    } <= rows.keys()
    assert rows["train.lr"]["default"] == "0.0002" and rows["train.tokens"]["default"] is None
    assert rows["data.path"]["default"] is None and rows["train.warmup"]["default"] == "2500"
    assert all(row["description"] for row in rows.values())


def test_mixers_that_studies_put_in_other_bodies_are_listed():
    rows = {row["name"]: row for row in CATALOGUES["mixers"](True)}
    other = rows["transformer++ in rwkv-7"]
    assert other["backbone"] == "rwkv-7" and other["parameters"] > rows["transformer++"]["parameters"]

"""A run goes on with what it was begun with."""

import pytest

from basecap.errors import ConfigError
from basecap.models.config import model_config
from basecap.records import StudyRecords
from basecap.study.provenance import refuse_other_plugins


def test_an_architecture_that_no_plugin_defines_any_more_is_another(tmp_path):
    model = model_config("transformer++", hidden=16, vocab=257, layers=1)
    records = StudyRecords(tmp_path).run("mine", 0)
    records.write_info({"plugins": {}})
    assert refuse_other_plugins(records, model) is None
    records.write_info({"plugins": {"0" * 64: "mine.py"}})
    with pytest.raises(ConfigError, match=r"another version of mine\.py"):
        refuse_other_plugins(records, model)

"""Text of a source that a plugin defines: read by workers, known by the plugin's code."""

import pytest

from basecap.data import DataConfig, prepare
from basecap.errors import DataError
from basecap.plugins import load_plugin
from tests.data.plugin_source import load_anew

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_a_plugin_source_is_read_by_other_processes_and_a_killed_one_is_replaced_once(tmp_path):
    plugin = tmp_path / "lines.py"
    plugin.write_text(
        """
import os
from basecap.data.sources import Document, Part, Source, source

@source("test-numbers")
class Numbers(Source):
    def parts(self):
        return [Part(str(number)) for number in range(4)]

    def read(self, part):
        killed = self.config.path and f"{self.config.path}-{part.name}"
        if killed and ("always" in killed or not os.path.exists(killed)):
            open(killed, "w").close()
            os._exit(1)
        for split in ("train", "validation", "test"):
            yield Document("numbers", split, f"{split} {part.name} " * 10)
"""
    )
    load_plugin(plugin)
    config = DataConfig(source="test-numbers", tokenizer="bytes", seq_len=8, train=["numbers"], workers=2)
    documents = prepare(config, tmp_path / "cache").documents("test", "numbers")
    assert len({tuple(documents.tokens(index)) for index in range(len(documents))}) == 4
    once, always = (config.model_copy(update={"path": str(tmp_path / name)}) for name in ("once", "always"))
    again = prepare(once, tmp_path / "other").documents("test", "numbers")
    assert [again.tokens(n).tolist() for n in range(4)] == [documents.tokens(n).tolist() for n in range(4)]
    assert len(list(tmp_path.glob("once-*"))) == 4
    with pytest.raises(DataError, match=r"was killed twice.*lower data\.workers"):
        prepare(always, tmp_path / "third")


def test_a_changed_plugin_is_read_again(tmp_path):
    plugin = tmp_path / "verses.py"
    program = """
from basecap.data.sources import Document, Part, Source, source

@source("test-verses")
class Verses(Source):
    def parts(self):
        return [Part("all")]

    def read(self, part):
        for split in ("train", "validation", "test"):
            yield Document("verses", split, f"{split} verse " * 10)
"""

    def prepared() -> str:
        load_anew(plugin, "test-verses")
        config = DataConfig(source="test-verses", tokenizer="bytes", seq_len=8, train=["verses"], workers=1)
        return prepare(config, tmp_path / "cache").manifest_hash

    def shards() -> int:
        return len(list((tmp_path / "cache" / "shards").iterdir()))

    plugin.write_text(program)
    first = prepared()
    assert prepared() == first and shards() == 1
    plugin.write_text(program + "# the same text\n")
    assert prepared() == first and shards() == 2
    plugin.write_text(program.replace("verse ", "prose "))
    assert prepared() != first and shards() == 3


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('yield Document("a", "train", "a")', 'yield {}["text"]', 12, "cannot read 'all': KeyError: 'text'"),
        ('yield Document("a", "train", "a")', 'yield "a"', None, "cannot read 'all': TypeError: read yields str, not"),
        (
            '"train"',
            '"training"',
            12,
            "cannot read 'all': ValueError: a document has the split 'training'; give one of",
        ),
        (', "a")', ", 5)", 12, "cannot read 'all': ValueError: the text of a document is int, not str"),
        ('[Part("all")]', '{}["parts"]', 9, "fails: KeyError: 'parts'"),
        ("super().__init__(config)", "config.url", 6, "cannot be opened: AttributeError: 'DataConfig' object has no"),
    ],
)
def test_a_plugin_source_that_fails_is_named_with_its_line(old, new, line, words, tmp_path):
    plugin = tmp_path / "fails.py"
    program = """from basecap.data.sources import Document, Part, Source, source

@source("test-fails")
class Fails(Source):
    def __init__(self, config):
        super().__init__(config)

    def parts(self):
        return [Part("all")]

    def read(self, part):
        yield Document("a", "train", "a")
"""
    plugin.write_text(program.replace(old, new))
    load_anew(plugin, "test-fails")
    config = DataConfig(source="test-fails", tokenizer="bytes", seq_len=8, train=["verses"], workers=1)
    with pytest.raises(DataError) as failed:
        prepare(config, tmp_path / "cache")
    assert str(failed.value).startswith(f"source 'test-fails' {words}")
    assert str(failed.value).endswith(f" ({plugin}:{line}); fix it." if line else "; fix it.")

"""docs/architectures.md is what the registry says."""

from pathlib import Path

from basecap.mixers import ARCHITECTURES
from basecap.models.architecture_page import page

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_is_what_the_registry_says():
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, (
        "run `python -m basecap.models.architecture_page > docs/architectures.md`"
    )
    assert "by a function of its own" not in text and "given values" not in text and "none named" not in text


def test_the_page_names_every_architecture_once():
    text = PAGE.read_text(encoding="utf-8")
    for name in filter(ARCHITECTURES.built_in, ARCHITECTURES.names()):
        assert text.count(f"\n## {name}\n") + text.count(f"\n- `{name}`: ") == 1, name

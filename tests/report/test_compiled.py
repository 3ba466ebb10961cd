"""Templates are compiled once, and again when they change; where nothing can be kept, each time."""

import sys

import pytest
from jinja2 import DictLoader, Environment

from basecap.report.compiled import Compiled


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the directory in which Python keeps what it compiles."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "kept"


def rendered(tmp_path, text: str) -> str:
    cache = Compiled(tmp_path / "templates")
    return Environment(loader=DictLoader({"page": text}), bytecode_cache=cache).get_template("page").render()


def test_a_template_is_compiled_once(tmp_path, kept, monkeypatch):
    assert rendered(tmp_path, "{{ 1 + 1 }}") == "2"
    (file,) = kept.rglob("*.pyc")
    monkeypatch.setattr(Environment, "compile", None)
    assert rendered(tmp_path, "{{ 1 + 1 }}") == "2" and [*kept.rglob("*.pyc")] == [file]


def test_a_changed_template_and_a_damaged_file_are_compiled_again(tmp_path, kept):
    rendered(tmp_path, "a")
    assert rendered(tmp_path, "b") == "b"
    (file,) = kept.rglob("*.pyc")
    file.write_bytes(b"damaged")
    assert rendered(tmp_path, "b") == "b" and len(file.read_bytes()) > 100


def test_a_page_needs_no_place_to_keep_what_is_compiled(tmp_path, kept, monkeypatch):
    kept.write_text("a file, so no directory")
    assert rendered(tmp_path, "a") == "a"
    kept.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered(tmp_path, "a") == "a" and not kept.exists()

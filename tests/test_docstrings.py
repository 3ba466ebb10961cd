"""The examples of docstrings run and print what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "basecap").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_hold(module: str):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted and not found.failed

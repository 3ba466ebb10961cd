"""Every RWKV traces into one graph."""

import pytest

from basecap.testing.check_mixer import check_mixer


@pytest.mark.parametrize("name", ["rwkv-4", "rwkv-5", "rwkv-6", "rwkv-7"])
def test_conforms_compiled(name: str):
    report = check_mixer(name, length=40, dtypes=(), compiled=True)
    assert any(check.name == "compiled" for check in report.checks)
    report.raise_failures()

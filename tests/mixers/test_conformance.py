"""Every registered architecture keeps the mixer contract; a new file in `basecap/mixers` is tested by existing."""

import pytest

from basecap.mixers._contract import ARCHITECTURES
from basecap.testing.check_mixer import check_mixer


@pytest.mark.parametrize("name", ARCHITECTURES.names())
def test_conforms(name):
    report = check_mixer(name)
    assert report.checks
    report.raise_failures()

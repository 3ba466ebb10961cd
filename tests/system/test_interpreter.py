"""The search for cycles is switched off for a block."""

import gc

import pytest

from basecap.system.interpreter import uncollected


def test_the_search_for_cycles_is_as_before_after_an_error():
    for before in (gc.enable, gc.disable):
        before()
        was = gc.isenabled()
        with pytest.raises(ValueError, match="inside"), uncollected():
            assert not gc.isenabled()
            raise ValueError("inside")
        assert gc.isenabled() == was
    gc.enable()

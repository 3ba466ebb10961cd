"""What commands that compute for a second leave out."""

import gc
import subprocess
import sys

import pytest

from basecap.interpreter import uncollected

PRODUCT = """
from pathlib import Path
from basecap.interpreter import loading_lightly
with loading_lightly():
    import numpy as np
np.ones((1000, 1000)) @ np.ones((1000, 1000))
print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_product_of_a_lightly_loaded_numpy_takes_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_the_search_for_cycles_is_as_before_after_an_error():
    for before in (gc.enable, gc.disable):
        before()
        was = gc.isenabled()
        with pytest.raises(ValueError, match="inside"), uncollected():
            assert not gc.isenabled()
            raise ValueError("inside")
        assert gc.isenabled() == was
    gc.enable()

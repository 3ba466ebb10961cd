"""What the core install lacks (triton on a CPU, the extras) is imported only where it is used."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
absent = "triton numba fla transformers datasets pyarrow lm_eval ray pytest hypothesis"
for missing in absent.split():
    sys.modules[missing] = None
import basecap
kernels = ("kernels", "launch", "library", "marks")  # marks are for pytest
names = [module.name for module in pkgutil.walk_packages(basecap.__path__, "basecap.")]
for name in names:
    if not name.rpartition(".")[2].startswith(kernels) and name != "basecap.hf":  # it says what to install
        importlib.import_module(name)
from basecap.cli.lists import CATALOGUES
print(len(CATALOGUES["mixers"](False)))
"""


def test_every_module_but_the_kernels_imports_without_extras():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 15

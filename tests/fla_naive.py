"""The references in plain PyTorch of flash-linear-attention, without its package, which imports Triton kernels."""

import importlib.util
from importlib.metadata import distribution
from types import ModuleType


def naive(path: str) -> ModuleType:
    """Return one file of `fla/ops`, such as "kda/naive"."""
    spec = importlib.util.spec_from_file_location("naive", distribution("fla-core").locate_file(f"fla/ops/{path}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

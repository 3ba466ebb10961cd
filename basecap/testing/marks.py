"""Marks for tests that need certain hardware."""

import pytest
import torch

#: The test needs a CUDA device: `@requires_gpu`; run them with `pytest -m gpu`.
requires_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

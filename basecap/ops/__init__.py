"""Sequence-mixing operations, usable without the rest of the package: they need torch and triton only.

    from basecap.ops import top1_chunk, top1_element    # attention by Top-1 selection, and its decoding steps
    from basecap.ops.delta_rule import delta_rule       # any other op is in the folder of its name

`help(OP)` has shapes, dtypes and errors; `README.md` in its folder, where there is one, has the mathematics. Invalid
arguments raise `basecap.errors.ConfigError`; GPUs run kernels, CPUs plain PyTorch.

The folders of all ops have the same shape. An op chooses between implementations, which `_dispatch` calls families:

    __init__.py      the op: checks of its arguments, the choice of a family, `influence`
    reference.py     its definition, for tests
    eager.py         the family in plain PyTorch, which runs everywhere
    NAME/            a family of kernels, as below
    operators.py     the functions of all families as one PyTorch operator; in a folder, those of this family alone
    check.py         what `basecap check` compares, see `cases`; a new op is found by this file, no list names it
    README.md        the mathematics, and what was measured, where the docstrings do not say it all

A folder is named after the language of its kernels or the library that has them, which is also how `basecap check` and
run.json call it:

    triton_kernels   in Triton; where an op has more than one, what sets them apart: triton_chunks, triton_tokens
    triton_step      in Triton, for one decoding step
    gluon_kernels    in Gluon, Triton's lower dialect
    numba_kernels    in Numba, for CPUs
    fla_kernels      of flash-linear-attention
    flex_kernels     of PyTorch's FlexAttention

    __init__.py      what the family supports, importable without Triton or Numba
    launch.py        allocates the results and starts the kernels; `operators` launches them from a record
    kernels*.py      the kernels

Beside the ops are parts that several of them share: `_recurrence` (ops with a state), `_selection` (Top-1),
`_dispatch`, `_shapes` (checks of arguments), `_transforms` (derivatives that are refused), `_influence`, `_sums`,
`_saved` (what is recomputed), `operators` (functions as PyTorch operators), `_replay`, `_kinds` (what records and
decisions depend on), `_launch`, `kernels_shared`, and `known_bad`: releases that are wrong on some GPUs.
"""

from basecap.ops._dispatch import (
    IMPLEMENTATIONS,
    choose,
    forget_compiled,
    note_compiled,
    recorded,
    unsupported_by_triton,
    without_autocast,
    without_kernels,
    without_numba,
)
from basecap.ops._influence import Influence
from basecap.ops._saved import keep_choice, keep_products, recomputed
from basecap.ops._shapes import check_devices, check_segments
from basecap.ops._sums import exact_device, exact_dtype, running_sums
from basecap.ops.top1_chunk import (
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_choice,
    top1_chunk_fill,
    top1_chunk_further,
    top1_chunk_step,
    top1_chunk_weights,
)
from basecap.ops.top1_element import top1_element, top1_element_choice, top1_element_step, top1_element_weights

__all__ = [
    "IMPLEMENTATIONS",
    "Influence",
    "check_devices",
    "check_segments",
    "choose",
    "exact_device",
    "exact_dtype",
    "forget_compiled",
    "keep_choice",
    "keep_products",
    "note_compiled",
    "recomputed",
    "recorded",
    "running_sums",
    "top1_chunk",
    "top1_chunk_cache",
    "top1_chunk_choice",
    "top1_chunk_fill",
    "top1_chunk_further",
    "top1_chunk_step",
    "top1_chunk_weights",
    "top1_element",
    "top1_element_choice",
    "top1_element_step",
    "top1_element_weights",
    "unsupported_by_triton",
    "without_autocast",
    "without_kernels",
    "without_numba",
]

"""Parts of the kernels that Numba compiles for the CPU, and how they are launched."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numba import njit
from torch import Tensor

#: Compiles a kernel at its first call. Threads run it side by side; multiplications may join the additions after them,
#: and sums be formed in any order, else no loop with a sum would use the processor's vectors.
kernel = njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
#: A part of a kernel, compiled within it: the compiler then sees which arrays are apart and which indices are positive,
#: without which a loop would use no vectors.
inlined = njit(inline="always", error_model="numpy", fastmath={"contract", "reassoc", "nsz"})

#: How much work is worth a thread: for some milliseconds PyTorch's own threads wait for theirs without sleeping.
WORK = 2**24
HALF = np.float32(0.5)
LOWEST, HIGHEST = np.float32(-127), np.float32(128)
#: The coefficients of 2^x for |x| <= 1/2, the highest power first.
POWER = tuple(
    np.float32(c)
    for c in (
        0.00015461444854736328,
        0.0013400427997112274,
        0.009618056938052177,
        0.05550327152013779,
        0.24022650718688965,
        0.6931471824645996,
    )
)


@inlined
def exp2_parts(x):
    """(scale, rest) in float32 with 2^x = scale + scale * rest, scale a power of two; 0 where it would be denormal.

    Unlike np.exp2 it fits a vector.
    """
    x = min(max(x, LOWEST), HIGHEST)
    whole = np.floor(x + HALF)
    x = x - whole
    rest = POWER[0] * x + POWER[1]
    rest = rest * x + POWER[2]
    rest = rest * x + POWER[3]
    rest = rest * x + POWER[4]
    rest = rest * x + POWER[5]
    bits = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return np.int32(bits).view(np.float32), rest * x


@inlined
def exp2(x):
    """2^x in float32, at most 1.4 * 2^-24 off."""
    scale, rest = exp2_parts(x)
    return scale * rest + scale


# A kernel's freedom to form sums in any order would leave nothing of the second result, and passes to the functions it
# calls unless they refuse.
@njit(error_model="numpy", fastmath=False)
def exact_sum(first, second):
    """(first + second rounded, what that rounding took); the latter is exact where |second| <= |first|."""
    total = first + second
    return total, second - (total - first)


def launch(
    function: Callable[..., None], tensors: Sequence[Tensor], sizes: Sequence[int], rows: int, work: int
) -> None:
    """Call function(*tensors as arrays, *sizes, first, last) for all rows, in a thread for each WORK of the `work`.

    Args:
        function: a kernel that works on the rows from `first` to `last`.
        tensors: what it takes first, on the CPU; they share their memory with its arrays.
        sizes: what it takes next.
        rows: how many rows there are.
        work: how many numbers it has to compute.
    """
    arrays = [tensor.numpy() for tensor in tensors]
    parts = max(1, min(torch.get_num_threads(), rows, work // WORK))
    if parts == 1:
        function(*arrays, *sizes, 0, rows)
        return
    edges = [rows * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        for done in [pool.submit(function, *arrays, *sizes, *span) for span in pairwise(edges)]:
            done.result()

"""Top-1 chunk selection on Hopper GPUs, in Triton's lower dialect Gluon.

`launch` has the functions of `eager`: the choice of one chunk and the backward pass in Gluon, the rest in Triton.
"""

import torch
from torch import Tensor

from basecap.ops._dispatch import constant_result, interpreted
from basecap.ops.top1_chunk import triton_kernels

RUNS, BACKEND = "Gluon kernels", "triton"

#: What its backward pass adds atomically is at most two numbers to a zero, of which either order has the same sum.
REPEATS = True


def supports(q: Tensor, chunk: int) -> str | None:
    """Return why the kernels cannot run on queries [..., K] and chunks of this size, or None."""
    reason = triton_kernels.supports(q, chunk)
    if reason is not None:
        return reason
    if chunk != 128 or q.shape[-1] not in (64, 128) or q.element_size() != 2:
        return "they take chunks of 128 and heads of 64 or 128 channels in 16 bits"
    return _unsupported(q.device) if q.is_cuda else f"the tensors are on {q.device.type}"


@constant_result
def _unsupported(device: torch.device) -> str | None:
    import triton

    if interpreted():
        return "Triton's interpreter does not run Gluon"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "the GPU is not a Hopper"
    if not triton.__version__.startswith(("3.6.", "3.7.")):  # an experiment: other versions may not even import it
        return f"Triton {triton.__version__} is neither 3.6 nor 3.7"
    return None

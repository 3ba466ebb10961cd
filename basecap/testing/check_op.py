"""Kernels against plain PyTorch on the machine at hand, judged by the definition in float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops._dispatch import unsupported
from basecap.ops.top1_chunk import Mode, top1_chunk, top1_chunk_weights
from basecap.ops.top1_chunk import reference as chunk_reference
from basecap.ops.top1_element import reference as element_reference
from basecap.ops.top1_element import top1_element
from basecap.testing.tolerance import assert_as_accurate, relative_error

Op = Callable[..., Tensor]


def _dense(q: Tensor, k: Tensor, v: Tensor, mode: Mode) -> Tensor:
    return chunk_reference.top1_chunk(q, k, v, top1_chunk_weights(q, k, chunk=64, mode=mode))


def _element(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return element_reference.top1_element(q, k, v, q.shape[3] ** -0.5)


#: Name -> the op, with `backend` left open, and its definition.
OPS: dict[str, tuple[Op, Op]] = {
    "top1-chunk exact": (partial(top1_chunk, chunk=64, mode="exact"), partial(_dense, mode="exact")),
    "top1-chunk approx": (partial(top1_chunk, chunk=64, mode="approx"), partial(_dense, mode="approx")),
    "top1-element": (top1_element, _element),
}


def check_op(name: str, device: torch.device, seed: int = 0) -> list[dict[str, Any]]:
    """Compare an op's kernels with plain PyTorch, outputs and gradients; one row per tensor and dtype.

    A row holds the relative errors of both and the result, "passed" or what is wrong. Where no kernels run there is
    one row that says so. Queries and keys are multiples of 1/8, so that scores are exact and all choose alike.

    Args:
        name: one of `OPS`.
        device: where to run.
        seed: of the random inputs.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in OPS:
        raise ConfigError(f"unknown op {name!r}: {nearest(name, OPS)}")
    op, definition = OPS[name]
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = [x.to(device, dtype) for x in _inputs(seed)]
        reason = unsupported(inputs[0])
        if reason is not None:
            rows.append({"op": name, "dtype": str(dtype), "result": f"no kernels: {reason}"})
            continue
        truth = _results(definition, [x.double() for x in inputs])
        plain, found = (_results(partial(op, backend=backend), inputs) for backend in ("eager", "triton"))
        for label, x, y, z in zip(("o", "dq", "dk", "dv"), found, plain, truth, strict=True):
            row: dict[str, Any] = {"op": name, "dtype": str(dtype), "tensor": label}
            row |= {"error": relative_error(x, z), "plain PyTorch": relative_error(y, z), "result": "passed"}
            try:
                assert_as_accurate(label, x, y, z)
            except AssertionError as error:
                row["result"] = str(error)
            rows.append(row)
    return rows


def _inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(2, 200, heads, 32, generator=generator) for heads in (4, 2, 2, 4))
    return [*((F.rms_norm(x, (32,)) * 8).round() / 8 for x in (q, k)), v, do]


def _results(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    o = op(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, inputs[3])]

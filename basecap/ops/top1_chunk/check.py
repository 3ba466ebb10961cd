"""The cases of Top-1 chunk selection."""

from functools import partial

from torch import Tensor

from basecap.ops._selection.draws import choices, with_exact_scores
from basecap.ops.cases import Case, Draw, by_backend
from basecap.ops.top1_chunk import FAMILIES, Mode, reference, top1_chunk, top1_chunk_weights

FUNCTIONS = ("choose", "attend", "attend_backward")


def _definition(q: Tensor, k: Tensor, v: Tensor, chunk: int, mode: Mode) -> Tensor:
    return reference.top1_chunk(q, k, v, top1_chunk_weights(q, k, chunk=chunk, mode=mode))


def _case(mode: Mode) -> Case:
    op, definition = (partial(function, chunk=64, mode=mode) for function in (top1_chunk, _definition))
    return by_backend(op, definition, choices, FAMILIES)


def _wide_case(mode: Mode, width: int) -> Case:
    """Return a case of the sizes for which Hopper GPUs have kernels of their own."""

    def inputs(draw: Draw, T: int) -> dict[str, Tensor]:
        return with_exact_scores(draw(1, 2 * T, 2, width), draw(1, 2 * T, 1, width), draw(1, 2 * T, 1, width))

    op, definition = (partial(function, chunk=128, mode=mode) for function in (top1_chunk, _definition))
    return by_backend(op, definition, inputs, FAMILIES)


CASES = {
    "top1-chunk exact": _case("exact"),
    "top1-chunk approx": _case("approx"),
    "top1-chunk exact, heads of 64": _wide_case("exact", 64),
    "top1-chunk approx, heads of 64": _wide_case("approx", 64),
    "top1-chunk exact, heads of 128": _wide_case("exact", 128),
    "top1-chunk approx, heads of 128": _wide_case("approx", 128),
}

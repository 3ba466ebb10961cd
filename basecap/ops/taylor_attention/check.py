"""The case of Taylor attention."""

from functools import partial

from torch import Tensor

from basecap.ops.cases import B, Case, Draw, H, K, N
from basecap.ops.taylor_attention import FAMILIES, eager, reference, taylor_attention
from basecap.ops.taylor_attention.triton_kernels import operators

FUNCTIONS = ("taylor_attention",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return {"q": draw(2 * B, T, H, N), "k": draw(2 * B, T, H, N), "v": draw(2 * B, T, H, K)}


CASES = {
    "taylor attention": Case(
        kernels=partial(taylor_attention, backend="triton"),
        # The kernels' own chunks: what goes through sums of features is rounded otherwise than through scores.
        plain=partial(eager.taylor_attention, chunk=operators.CHUNK),
        definition=reference.taylor_attention,
        inputs=_inputs,
        families=FAMILIES,
    )
}

"""The cases of attention to chosen blocks: of 32 keys, and of one."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from basecap.ops.cases import B, Case, Draw, H, K
from basecap.ops.selected_attention import FAMILIES, eager, reference, selected_attention

FUNCTIONS = ("attention",)
#: Tokens of whole tiles.
WHOLE = 512


def _inputs(whole: bool, draw: Draw, T: int) -> dict[str, Tensor]:
    return {name: draw(B, WHOLE if whole else T, heads, K) for name, heads in (("q", 2 * H), ("k", H), ("v", H))}


def _choosing(run: Callable[..., Tensor], block: int) -> Callable[..., Tensor]:
    """Return a function of q, k and v, whose queries have chosen a third of the blocks and their own."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        like = next(x for x in (q, k, v) if isinstance(x, Tensor))  # a list is for the op to refuse
        T, generator = like.shape[1], torch.Generator().manual_seed(0)
        own = torch.arange(T) // block
        drawn = torch.rand(B, T, H, -(-T // block), generator=generator) < 1 / 3
        chosen = drawn | (own[:, None, None] == torch.arange(drawn.shape[3]))
        return run(q, k, v, chosen.to(like.device), own.to(like.device).expand(B, T))

    return attend


def _case(block: int) -> Case:
    return Case(
        plain=_choosing(selected_attention, block),
        definition=_choosing(partial(reference.attention, scale=K**-0.5), block),
        inputs=partial(_inputs, False),
        families=FAMILIES,
    )


def _whole_case(block: int) -> Case:
    """On a GPU, lengths of whole tiles run on FlexAttention."""
    return Case(
        kernels=_choosing(selected_attention, block),
        plain=_choosing(partial(eager.attention, scale=K**-0.5, segments=None), block),
        definition=_choosing(partial(reference.attention, scale=K**-0.5), block),
        inputs=partial(_inputs, True),
        families=FAMILIES,
        cuda=True,
    )


CASES = {
    "selected attention": _case(32),
    "selected attention, whole tiles": _whole_case(32),
    "selected attention, tokens": _whole_case(1),
}

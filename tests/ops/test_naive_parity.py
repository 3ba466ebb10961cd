"""Parity with the references in plain PyTorch of flash-linear-attention: outputs, final states, all gradients.

They compute in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops.attention import attention
from basecap.ops.delta_rule import delta_rule
from basecap.ops.forgetting_attention import forgetting_attention
from basecap.ops.ssd import ssd
from basecap.ops.taylor_attention import taylor_attention
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7
from tests.fla_naive import naive

B, T, H, K, V = 2, 150, 3, 16, 24
SCALE = K**-0.5

Results = tuple[Tensor, ...]


class Inputs(NamedTuple):
    """What an op may take; every op ignores some of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    state: Tensor
    channel_decay: Tensor
    bonus: Tensor
    asked: Tensor
    added: Tensor


def draw() -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    removal = F.normalize(normal(B, T, H, K), dim=-1)
    x = Inputs(
        q=normal(B, T, H, K),
        k=F.normalize(normal(B, T, H, K), dim=-1),
        v=normal(B, T, H, V),
        beta=normal(B, T, H).sigmoid(),
        decay=-0.2 * normal(B, T, H).abs(),
        state=normal(B, H, K, V),
        channel_decay=-0.6 * normal(B, T, H, K).sigmoid(),
        bonus=normal(H, K),
        asked=-removal,
        added=removal * normal(B, T, H, K).sigmoid(),
    )
    return Inputs(*(leaf.requires_grad_() for leaf in x))


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def heads_last(o: Tensor, *rest: Tensor) -> Results:
    return o.transpose(1, 2), *rest


def the_delta_rule(x: Inputs) -> tuple[Results, Results]:
    recur = naive("delta_rule/naive").delta_rule_recurrence
    theirs = recur(*heads_first(x.q, x.k, x.v, x.beta), initial_state=x.state)
    return delta_rule(x.q * SCALE, x.k, x.v, x.beta, state_BHKV=x.state), heads_last(*theirs)


def the_gated_delta_rule(x: Inputs) -> tuple[Results, Results]:
    recur = naive("gated_delta_rule/naive").naive_recurrent_gated_delta_rule
    theirs = recur(x.q, x.k, x.v, x.beta, x.decay, initial_state=x.state, output_final_state=True)
    return delta_rule(x.q * SCALE, x.k, x.v, x.beta, x.decay, state_BHKV=x.state), theirs


def mamba_2(x: Inputs) -> tuple[Results, Results]:
    theirs = naive("simple_gla/naive").naive_recurrent_simple_gla(x.q, x.k, x.v, x.decay, initial_state=x.state)
    return ssd(x.q * SCALE, x.k, x.v, x.decay, state_BHKV=x.state), theirs


def rwkv_6(x: Inputs) -> tuple[Results, Results]:
    recur = naive("rwkv6/recurrent_naive").naive_recurrent_rwkv6
    inputs = heads_first(x.q, x.k, x.v, x.channel_decay)
    theirs = recur(*inputs, x.bonus, scale=1.0, initial_state=x.state, output_final_state=True)
    return wkv6(x.q, x.k, x.v, x.channel_decay, x.bonus, state_BHKV=x.state), heads_last(*theirs)


def rwkv_7(x: Inputs) -> tuple[Results, Results]:
    recur = naive("generalized_delta_rule/dplr/naive").dplr_recurrence
    theirs = recur(*heads_first(x.q, x.k, x.v, x.asked, x.added, x.channel_decay), initial_state=x.state)
    ours = wkv7(x.q * SCALE, x.channel_decay, x.k, x.v, x.asked, x.added, state_BHKV=x.state)
    return ours, heads_last(*theirs)


def based(x: Inputs) -> tuple[Results, Results]:
    theirs = naive("based/naive").naive_parallel_based(*heads_first(x.q, x.k, x.v))
    return (taylor_attention(x.q, x.k, x.v, eps=1e-6),), heads_last(theirs)


def full_attention(x: Inputs) -> tuple[Results, Results]:
    theirs, _ = naive("attn/naive").naive_parallel_attn(x.q, x.k[:, :, :1], x.v[:, :, :1])
    return (attention(x.q, x.k[:, :, :1], x.v[:, :, :1]),), (theirs,)


def window_attention(x: Inputs) -> tuple[Results, Results]:
    theirs, _ = naive("attn/naive").naive_parallel_attn(x.q, x.k, x.v, window_size=20)
    return (attention(x.q, x.k, x.v, window=20),), (theirs,)


def fox(x: Inputs) -> tuple[Results, Results]:
    theirs = naive("forgetting_attn/naive").naive_forgetting_attn(x.q, x.k, x.v, x.decay)
    return (forgetting_attention(x.q, x.k, x.v, x.decay),), (theirs,)


#: The op, and of how many inputs it has gradients.
OPS = [
    (the_delta_rule, 5),
    (the_gated_delta_rule, 6),
    (mamba_2, 5),
    (rwkv_6, 6),
    (rwkv_7, 7),
    (based, 3),
    (full_attention, 3),
    (window_attention, 3),
    (fox, 4),
]


def gradients(results: Results, x: Inputs) -> list[Tensor]:
    """Return the gradients of weighted sums, of every input that has one."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator) for y in results]
    found = torch.autograd.grad(results, x, weights, allow_unused=True)
    return [y for y in found if y is not None]


@pytest.mark.parametrize(("op", "inputs"), OPS, ids=[op.__name__ for op, _ in OPS])
def test_equals_the_naive_reference(op: Callable[[Inputs], tuple[Results, Results]], inputs: int):
    x = draw()
    ours, theirs = op(x)
    found, expected = gradients(ours, x), gradients(theirs, x)
    assert len(found) == len(expected) == inputs
    for y, z in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=1e-5 * z.detach().abs().max().item())

"""Attention with forget gates against its definition in float64; what the gates close is skipped without a trace."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops.attention import reference as plain_reference
from basecap.ops.forgetting_attention import (
    eager,
    forgetting_attention,
    forgetting_attention_step,
    reference,
)
from basecap.testing.tolerance import assert_as_accurate

SEGMENTS = (torch.arange(300) >= torch.tensor([[40], [170]])).long()


def inputs(T=300, H=2, K=8, V=6, dtype=torch.float64, strength=1.0):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(2, T, H, *shape, generator=generator, dtype=torch.float64)

    log_decay = torch.nn.functional.logsigmoid(draw() + 1) * strength
    return [x.to(dtype).requires_grad_() for x in (draw(K), draw(K), draw(V))] + [log_decay.requires_grad_()]


def loop(q, k, v, log_decay, segments):
    """The definition, one query at a time."""
    B, T, H, K = q.shape
    rows = []
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
            for h in range(H):
                gates = [log_decay[b, s + 1 : t + 1, h].sum() for s in seen]
                scores = torch.stack([q[b, t, h] @ k[b, s, h] / K**0.5 for s in seen]) + torch.stack(gates)
                rows.append(scores.softmax(0) @ v[b, seen, h])
    return torch.stack(rows).view(B, T, H, -1)


@pytest.mark.parametrize("packed", [False, True])
def test_reference_is_the_definition(packed):
    given = inputs(T=19)
    segments = (torch.arange(19) >= torch.tensor([[4], [11]])).long() if packed else None
    torch.testing.assert_close(reference.attention(*given, 8**-0.5, segments), loop(*given, segments))


@pytest.mark.parametrize("strength", [0.01, 1.0], ids=["open", "closing"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_outputs_and_gradients(strength, segments):
    given = inputs(strength=strength)
    do = torch.randn(2, 300, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = [forgetting_attention(*given, segments=segments), reference.attention(*given, 8**-0.5, segments)]
    torch.testing.assert_close(*results)
    grads = (torch.autograd.grad(o, given, do) for o in results)
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength", [0.01, 3.0], ids=["open", "closing"])
def test_as_accurate_as_the_definition(strength, dtype):
    q, k, v, log_decay = (x.detach() for x in inputs(dtype=dtype, strength=strength))
    true = reference.attention(q.double(), k.double(), v.double(), log_decay, 8**-0.5)
    plain = reference.attention(q, k, v, log_decay.float(), 8**-0.5)
    assert_as_accurate("o", forgetting_attention(q, k, v, log_decay.float()), plain, true)


def test_what_the_gates_close_is_skipped_and_changes_nothing():
    given = inputs(strength=2.0)
    q, k = (x.transpose(1, 2) for x in given[:2])
    starts = eager.first_open_keys(q, k, eager.totals(given[3]), 8**-0.5)
    assert starts[0] == 0 and 0 < starts[1] < 128 and 128 < starts[2] < 256
    results = [eager.attention(*given, 8**-0.5, None, skip=skip) for skip in (True, False)]
    results = [[o, *torch.autograd.grad(o.square().sum(), given)] for o in results]
    for skipping, whole in zip(*results, strict=True):
        assert (skipping - whole).abs().max() <= 8 * torch.finfo(torch.float64).eps * whole.abs().max()


def test_open_gates_skip_nothing_and_are_attention():
    q, k, v, log_decay = inputs()
    log_decay = torch.zeros_like(log_decay)
    assert eager.first_open_keys(q.transpose(1, 2), k.transpose(1, 2), eager.totals(log_decay), 8**-0.5) == [0, 0, 0]
    torch.testing.assert_close(
        forgetting_attention(q, k, v, log_decay), plain_reference.attention(q, k, v, 8**-0.5), rtol=1e-12, atol=1e-13
    )


def test_gates_that_are_closed_leave_the_token_itself():
    q, k, v, log_decay = inputs(T=200)
    for closed in (-1e4, -torch.inf):
        torch.testing.assert_close(forgetting_attention(q, k, v, torch.full_like(log_decay, closed)), v)


def test_a_step_is_the_last_row():
    q, k, v, log_decay = inputs(T=40)
    expected = reference.attention(q, k, v, log_decay, 8**-0.5)
    torch.testing.assert_close(forgetting_attention_step(q[:, -1:], k, v, log_decay), expected[:, -1:])
    last = torch.tensor([20, 39])  # of each row
    visible = torch.arange(40) <= last[:, None]
    step = forgetting_attention_step(q[[0, 1], last][:, None], k, v, log_decay, visible_BS=visible)
    torch.testing.assert_close(step, expected[[0, 1], last][:, None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, g: forgetting_attention(q, k, v, g[..., None]), r"log_decay .* must be \[B, T, H\]"),
        (lambda q, k, v, g: forgetting_attention(q[:, :3], k, v, g), "as k"),
        (lambda q, k, v, g: forgetting_attention(q, k, v[:, :3], g), "must be"),
        (lambda q, k, v, g: forgetting_attention(q, k.float(), v, g), "share a dtype"),
        (lambda q, k, v, g: forgetting_attention(q, k, v, g, scale=0.0), "scale must be positive"),
        (lambda q, k, v, g: forgetting_attention(q, k, v, g, segments=SEGMENTS), "segments"),
        (lambda q, k, v, g: forgetting_attention(q[:, :0], k[:, :0], v[:, :0], g[:, :0]), "at least one token"),
        (lambda q, k, v, g: forgetting_attention_step(q, k, v, g), "one token"),
    ],
)
def test_bad_inputs_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        change(*inputs(T=9))

"""The delta rule by channel, in plain PyTorch, against its definition in float64."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.channel_delta_rule import (
    channel_delta_rule,
    channel_influence,
    decoupled_delta_rule,
    decoupled_influence,
    eager,
    reference,
)
from basecap.ops.channel_delta_rule.triton_tokens import as_wkv7
from basecap.ops.wkv7 import wkv7
from basecap.testing.tolerance import assert_as_accurate
from tests.ops.test_delta_rule import inputs, packed, values_and_gradients


def by_channel(B: int, T: int, H: int, K: int, V: int, strength: float = 1.0) -> list[Tensor]:
    """q, k, v, erasing strengths in (0, 1), log decays [B, T, H, K], state."""
    q, k, v, _, _, state = inputs(B, T, H, K, V)
    erase, rate = torch.randn(2, B, T, H, K, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
    return [q, k, v, erase.sigmoid().requires_grad_(), (-strength * rate.abs()).requires_grad_(), state]


def decoupled(q, k, v, erase, log_decay, state, segments=None):
    return decoupled_delta_rule(q, k, v, erase, log_decay, state_BHKV=state, segments=segments)


def defined(q, k, v, erase, log_decay, state, segments=None):
    return reference.channel_delta_rule(q, k, v, erase * k, log_decay, state, segments)


@pytest.mark.parametrize("T", [1, 7, 70])
@pytest.mark.parametrize("segmented", [False, True])
def test_chunks_by_channel_equal_the_definition(T: int, segmented: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "CHUNK", 8)
    tensors, segments = by_channel(2, T, 3, 5, 4), packed(2, T) if segmented else None
    expected = values_and_gradients(defined, tensors, segments)
    for a, b in zip(values_and_gradients(decoupled, tensors, segments), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_float32_by_channel_is_as_good_as_the_recurrence_in_float32(strength: float):
    exact = by_channel(1, 100, 2, 8, 4, strength)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected, recurrent = (values_and_gradients(defined, tensors) for tensors in (exact, single))
    chunked = values_and_gradients(decoupled, single)
    for number, (a, b, truth) in enumerate(zip(chunked, recurrent, expected, strict=True)):
        assert_as_accurate(f"result {number}", a, b, truth)


def test_the_rule_by_channel_is_a_case_of_wkv7():
    q, k, v, erase, log_decay, state = by_channel(2, 40, 2, 6, 5)
    r, decays, written, a, b = as_wkv7(q, k, erase * k, log_decay)
    expected = wkv7(r, decays, written, v, a, b, state_BHKV=state)
    for ours, theirs in zip(decoupled(q, k, v, erase, log_decay, state), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_one_strength_for_erasing_and_writing_is_the_rule_by_channel():
    q, k, v, _, log_decay, state = by_channel(2, 40, 2, 6, 5)
    beta = inputs(2, 40, 2, 6, 5)[3]
    expected = channel_delta_rule(q, k, v, beta, log_decay, state_BHKV=state)
    found = decoupled(q, k, beta[..., None] * v, beta[..., None].expand_as(k), log_decay, state)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match=r"q \(2, 40, 2, 6\) and erase \(2, 40, 2\) must both be \[B, T, H, K\]"):
        decoupled_delta_rule(q, k, v, beta, log_decay)


def test_the_influence_times_the_values_is_the_output():
    q, k, v, erase, log_decay, _ = by_channel(2, 40, 2, 6, 5)
    o, _ = decoupled_delta_rule(q, k, v, erase, log_decay)
    found = torch.einsum("bhts,bshv->bthv", decoupled_influence(q, k, erase, log_decay).whole(), v)
    torch.testing.assert_close(found, o, rtol=1e-10, atol=1e-10)
    beta = erase[..., 0]
    o, _ = channel_delta_rule(q, k, v, beta, log_decay)
    found = torch.einsum("bhts,bshv->bthv", channel_influence(q, k, beta, log_decay).whole(), v)
    torch.testing.assert_close(found, o, rtol=1e-10, atol=1e-10)


def test_strengths_that_do_not_fit_are_refused():
    q, k, v, _, log_decay, _ = by_channel(1, 4, 2, 3, 3)
    with pytest.raises(ConfigError, match=r"beta \(1, 4, 2, 3\) must be \[B, T, H\] = \(1, 4, 2\)"):
        channel_delta_rule(q, k, v, k, log_decay)

"""The choice of chunks alone, against scores in float64: random shapes, large scores, strides."""

import random
import secrets

import pytest
import torch
from torch import Tensor

from basecap.ops import top1_chunk_choice
from basecap.ops._dispatch import interpreted
from basecap.testing.marks import requires_gpu
from tests.ops._choices import Rules, assert_choice

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
PATHS = [
    pytest.param("eager", "cpu", torch.float32),
    pytest.param("eager", "cpu", torch.bfloat16),
    pytest.param("triton", "cpu", torch.float32, marks=in_interpreter),
    *(pytest.param("triton", "cuda", dtype, marks=requires_gpu) for dtype in (torch.float16, torch.bfloat16)),
    pytest.param("triton", "cuda", torch.float32, marks=requires_gpu),
]
# Lanes that a mask switches off may hold anything; the interpreter warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def draw(seed: int, B: int, T: int, heads: tuple[int, int], K: int) -> list[Tensor]:
    """Return q and k."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, n, K, generator=generator) for n in heads]


def cut(seed: int, B: int, T: int) -> Tensor:
    """Return segments, of which every row has about three."""
    return (torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 2 / T).long().cumsum(1)


@pytest.mark.parametrize(("backend", "device", "dtype"), PATHS)
@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_choices_are_best_whatever_the_input(mode, backend, device, dtype, poisoned):
    """Another seed each time: the message names it, and what it gives."""
    seed = secrets.randbits(60)
    dice = random.Random(seed)
    for trial in range(3):
        B, G, chunk = dice.choice([1, 2]), dice.choice([1, 2]), dice.choice([16, 16, 16, 32, 64])
        H, K = G * dice.choice([1, 2]), dice.choice([16, 24, 40, 64, 128])
        T = chunk * dice.randint(4, 3 + 96 // chunk) + dice.randrange(chunk)
        packed, scale, gain = dice.random() < 0.5, dice.choice([None, 0.03, 1.0]), dice.choice([0.5, 1.0, 20.0])
        q, k = draw(seed + trial, B, T, (H, G), K)
        q, k = (q * gain).to(device, dtype), k.to(device, dtype)
        segments = cut(seed + trial, B, T).to(device) if packed else None
        remote = dice.choice([1, 1, 1, 2, 3])
        rules = Rules(chunk, mode, remote, scale, segments)
        choice = top1_chunk_choice(q, k, **vars(rules), backend=backend)
        name = f"seed {seed}, trial {trial}, {(B, T, H, G, K)=}, {chunk=}, {remote=}, {scale=}, {gain=}, {packed=}"
        assert_choice(choice, q, k, rules, name)


@pytest.mark.parametrize(("backend", "device", "dtype"), PATHS)
@pytest.mark.parametrize(("K", "chunk", "remote"), [(32, 16, 1), (40, 32, 2), (32, 128, 1)])
@pytest.mark.parametrize("large", ["queries", "one key"])
def test_large_scores(large, K, chunk, remote, backend, device, dtype, poisoned):
    """The largest scores decide, or (one key that nobody has to choose from) all are as usual but might not be."""
    T = 4 * chunk + 9
    q, k = (x.to(device, dtype) for x in draw(T + K, 1, T, (2, 1), K))
    if large == "queries":
        q = q * 40
    else:
        k[:, -1] *= 200
    rules = Rules(chunk, "exact", remote)
    assert_choice(top1_chunk_choice(q, k, **vars(rules), backend=backend), q, k, rules)


@pytest.mark.parametrize(("backend", "device", "dtype"), PATHS)
@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_inputs_need_not_be_contiguous(mode, backend, device, dtype, poisoned):
    q, k = (x.to(device, dtype) for x in draw(3, 2, 90, (2, 2), 32))
    joined = torch.stack([q, k], dim=2).unbind(2)
    turned = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (q, k)]
    rules = Rules(16, mode, 2, None, cut(3, 2, 90).to(device))
    for views in (joined, turned):
        assert not any(x.is_contiguous() for x in views)
        assert_choice(top1_chunk_choice(*views, **vars(rules), backend=backend), q, k, rules)

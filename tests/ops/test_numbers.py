"""Options may be NumPy's numbers; tensors in their place, and dtypes that no op computes with, are named."""

import numpy as np
import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops import (
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_choice,
    top1_chunk_fill,
    top1_chunk_step,
    top1_chunk_weights,
    top1_element,
    top1_element_step,
)
from basecap.ops._dispatch import interpreted
from basecap.ops.attention import attention, attention_step
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.taylor_attention import taylor_attention

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
x = torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(0))


def decode(backend, sizes, length, **options):
    cache = top1_chunk_cache(*sizes, chunk=options["chunk"])
    top1_chunk_fill(x[:, :19], x[:, :19], cache, chunk=options["chunk"])
    return top1_chunk_step(*[x[:, 19:]] * 3, cache, length, mode="approx", backend=backend, **options)


def loss(chunk):
    return linear_cross_entropy(x[0, :, 0], x[0, :9, 0], torch.arange(20) % 9, chunk=chunk)


@pytest.mark.parametrize(
    "call",
    [
        lambda i, f: top1_chunk(x, x, x, chunk=i(16), scale=f(0.25), remote=i(1)),
        lambda i, f: top1_chunk_choice(x, x, chunk=i(16), scale=f(0.25), remote=i(2)),
        lambda i, f: top1_chunk_weights(x, x, chunk=i(16), scale=f(0.25), remote=i(1)),
        lambda i, f: top1_element(x, x, x.clone().requires_grad_(), scale=f(0.25)),
        lambda i, f: top1_element_step(*[x[:, :1]] * 3, {"k": x.clone(), "v": x.clone()}, i(3)),
        lambda i, f: attention(x, x, x, scale=f(0.25), window=i(3)),
        lambda i, f: attention_step(x[:, :1], x, x, scale=f(0.25)),
        lambda i, f: taylor_attention(x, x, x, eps=f(0.25)),
        lambda i, f: loss(i(7)),
        lambda i, f: decode("eager", [i(1), i(20), i(1), i(16)], i(19), chunk=i(16), scale=f(0.25), remote=i(1)),
        pytest.param(
            lambda i, f: decode("triton", [1, 20, 1, 16], i(19), chunk=i(16), scale=f(0.25), remote=i(1)),
            marks=in_interpreter,
        ),
    ],
)
def test_numbers_of_numpy_are_numbers(call):
    assert torch.equal(call(np.int64, np.float32), call(int, float))


def test_tensors_are_no_numbers():
    for op in (top1_chunk, top1_element, attention):
        with pytest.raises(ConfigError, match=r"scale must be positive and a Python number, not tensor\(0\.1"):
            op(x, x, x, scale=torch.tensor(0.1))
    with pytest.raises(ConfigError, match=r"a power of two from 16 to 256, a Python number, not tensor\(16\)"):
        top1_chunk(x, x, x, chunk=torch.tensor(16))
    with pytest.raises(ConfigError, match=r"eps must be at least 0 and a Python number, not tensor\(1\)"):
        taylor_attention(x, x, x, eps=torch.tensor(1))
    for truth in (True, np.True_):
        with pytest.raises(ConfigError, match="scale must be positive and a Python number"):
            top1_element(x, x, x, scale=truth)


def test_dtypes_that_no_op_computes_with_are_named():
    short = x.to(torch.float8_e4m3fn)
    for op in (top1_chunk, top1_element, attention, taylor_attention):
        with pytest.raises(
            ConfigError, match=r"must be float16, bfloat16, float32 or float64, not torch\.float8_e4m3fn"
        ):
            op(short, short, short)
    with pytest.raises(ConfigError, match=r"torch\.dtype of 16, 32 or 64 bits, not torch\.float8_e5m2"):
        top1_chunk_cache(1, 20, 1, 16, dtype=torch.float8_e5m2)
    with pytest.raises(
        ConfigError, match=r"the cache's k torch\.float8_e4m3fn; make the cache with dtype=torch.float32"
    ):
        top1_element_step(*[x[:, :1]] * 3, {"k": short, "v": short}, 3)

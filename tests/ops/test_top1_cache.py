"""What Top-1 selection refuses, and what it does with an empty batch."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import (
    top1_chunk,
    top1_chunk_cache,
    top1_chunk_choice,
    top1_chunk_fill,
    top1_chunk_further,
    top1_chunk_step,
    top1_chunk_weights,
    top1_element,
    top1_element_choice,
    top1_element_step,
    top1_element_weights,
)
from basecap.ops._dispatch import interpreted

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
BACKENDS = ["eager", pytest.param("triton", marks=in_interpreter)]
OPS = [top1_chunk, top1_element]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def token(B: int = 2, T: int = 1, H: int = 4, G: int = 2, K: int = 32) -> list[Tensor]:
    """Return q, k and v."""
    return [draw(B, T, n, K) for n in (H, G, G)]


#: q, k and v, other arguments of a step, what the error says; of a cache for 40 tokens, 20 of them there.
STEPS = [
    (token(G=1), {}, r"cache's k \(2, 40, 2, 32\) must be \(2, 40, 1, 32\)"),
    (token(G=4), {}, r"cache's k \(2, 40, 2, 32\) must be \(2, 40, 4, 32\)"),
    (token(B=1), {}, r"must be \(1, 40, 2, 32\)"),
    (token(B=8), {}, r"must be \(8, 40, 2, 32\)"),
    (token(K=64), {}, r"must be \(2, 40, 2, 64\)"),
    ([token()[0], *token(B=1)[1:]], {}, r"k \(1, 1, 2, 32\) must have the B, T and K of q"),
    (token(T=2), {}, "have 2 tokens; a step takes one"),
    (token(H=3), {}, "q has 3 heads, which is not a multiple of the 2"),
    ([*token()[:2], token()[2].double()], {}, "v is torch.float64 on cpu, q is torch.float32"),
    ([x.double() for x in token()], {}, "make the cache with dtype=torch.float64"),
    ([x.to("meta") for x in token()], {}, "cache's k is on cpu, k is on meta"),
    (token(), {"length": -1}, "length must be the number of tokens"),
    (token(), {"length": 1.0}, "length must be the number of tokens"),
    (token(), {"length": 40}, "the cache is full"),
]
OPTIONS = [
    ({"chunk": 32}, r"cache's sums \(2, 3, 2, 32\) must be \(2, 2, 2, 32\) for .* chunk 32"),
    ({"chunk": 48}, "chunk must be a power of two"),
    ({"remote": 0}, "remote must be an integer of at least 1"),
    ({"remote": 1.5}, "remote must be an integer of at least 1, not 1.5"),
    ({"scale": -1.0}, "scale must be positive"),
    ({"mode": "exakt"}, "did you mean 'exact'"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("new", "change", "message"), STEPS + [(token(), *option) for option in OPTIONS], ids=lambda x: str(x)[:24]
)
def test_a_step_that_does_not_fit_its_cache_changes_nothing(new, change, message, backend):
    cache = top1_chunk_cache(2, 40, 2, 32, chunk=16)
    top1_chunk_fill(*token(T=20)[1:], cache, chunk=16)
    before = {name: x.clone() for name, x in cache.items()}
    options = {"length": 20, "chunk": 16, "backend": backend, **change}
    with pytest.raises(ConfigError, match=message):
        top1_chunk_step(*new, cache, options.pop("length"), **options)
    assert all(torch.equal(cache[name], before[name]) for name in before)


@pytest.mark.parametrize(("new", "change", "message"), STEPS, ids=lambda x: str(x)[:24])
def test_element_steps_are_checked_alike(new, change, message):
    cache = {"k": torch.zeros(2, 40, 2, 32), "v": torch.zeros(2, 40, 2, 32)}
    with pytest.raises(ConfigError, match=message):
        top1_element_step(*new, cache, change.get("length", 20))
    assert not any(x.any() for x in cache.values())


@pytest.mark.parametrize("cache", [None, {}, {"k": [0.0], "v": [0.0], "sums": [0.0]}], ids=str)
def test_what_is_no_cache_is_refused(cache):
    q, k, v = token()
    for call in (
        lambda: top1_chunk_fill(k, v, cache),
        lambda: top1_chunk_further(q, k, v, cache, 0),
        lambda: top1_chunk_step(q, k, v, cache, 0),
        lambda: top1_element_step(q, k, v, cache, 0),
    ):
        said = "; it has no k" if cache is not None else ", not NoneType"
        with pytest.raises(ConfigError, match=f"cache must be a dict of the tensors k, v(, sums)?{said}"):
            call()


@pytest.mark.parametrize(
    ("new", "chunk", "message"),
    [
        (token(T=41), 16, "the cache is full: it has room for 40 tokens, not 41"),
        (token(T=40), 32, "cache's sums"),
        (token(T=40), 48, "chunk must be a power of two"),
        (token(T=20, G=1), 16, "cache's k"),
        (token(T=20, B=1), 16, "cache's k"),
        ([x.double() for x in token(T=20)], 16, "make the cache with dtype=torch.float64"),
        ([x.to("meta") for x in token(T=20)], 16, "cache's k is on cpu, k is on meta"),
        ([*token(T=20)[:2], token(T=20, G=1)[2]], 16, r"v \(2, 20, 1, 32\) must have the shape of k"),
        ([*token(T=20)[:2], token(T=20)[2].half()], 16, "v is torch.float16 on cpu, [kq] is torch.float32"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_a_prompt_that_does_not_fit_is_refused(new, chunk, message):
    cache = top1_chunk_cache(2, 40, 2, 32, chunk=16)
    with pytest.raises(ConfigError, match=message):
        top1_chunk_fill(*new[1:], cache, chunk=chunk)
    with pytest.raises(ConfigError, match=message):
        top1_chunk_further(*new, cache, 0, chunk=chunk)
    assert not any(x.any() for x in cache.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 48}, "chunk must be a power of two"),
        ({"batch": -1}, "batch must be an integer of at least 0"),
        ({"max_length": 1.5}, "max_length must be an integer of at least 0"),
        ({"heads": 0}, "heads must be an integer of at least 1"),
        ({"head_dim": True}, "head_dim must be an integer of at least 1"),
        ({"dtype": torch.int32}, "dtype must be a floating-point"),
        ({"dtype": "float32"}, "dtype must be a floating-point"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(change, message):
    sizes = {"batch": 1, "max_length": 40, "heads": 2, "head_dim": 32, "chunk": 16}
    with pytest.raises(ConfigError, match=message):
        top1_chunk_cache(**{**sizes, **change})


@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_a_wider_cache_computes_in_its_dtype(mode):
    """As under autocast, where the parameters and so the cache are float32."""
    q, k, v = (x.bfloat16() for x in token(T=40))
    cache = top1_chunk_cache(2, 40, 2, 32, chunk=16)
    top1_chunk_fill(k[:, :39], v[:, :39], cache, chunk=16)
    o = top1_chunk_step(*(x[:, 39:] for x in (q, k, v)), cache, 39, chunk=16, mode=mode)
    whole = top1_chunk(q.float(), k.float(), v.float(), chunk=16, mode=mode)[:, 39:]
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, whole.bfloat16(), rtol=2**-7, atol=1e-6)
    kept = {"k": k.float(), "v": v.float()}
    chosen = top1_element_step(*(x[:, 39:] for x in (q, k, v)), kept, 39)
    assert torch.equal(chosen.bfloat16(), top1_element(q, k, v)[:, 39:])


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_decoding_with_parameters_keeps_no_graph(backend):
    """A cache with the graphs of its tokens would grow with every step."""
    q, k, v = (x.requires_grad_() for x in token(T=40))
    cache = top1_chunk_cache(2, 40, 2, 32, chunk=16)
    top1_chunk_fill(k[:, :39], v[:, :39], cache, chunk=16)
    last = [x[:, 39:] for x in (q, k, v)]
    kept = {name: cache[name].clone() for name in ("k", "v")}
    outputs = [top1_chunk_step(*last, cache, 39, chunk=16, backend=backend), top1_element_step(*last, kept, 39)]
    assert not any(x.requires_grad for x in (*cache.values(), *kept.values(), *outputs))


@pytest.mark.parametrize(
    ("mode", "backend", "first"),
    [("exact", "eager", 20), ("approx", "eager", 20), pytest.param("approx", "triton", 44, marks=in_interpreter)],
)
def test_tokens_that_are_taken_back_leave_nothing(mode, backend, first):
    """Drafts are overwritten, within a chunk and over the ends of chunks: every bit is as if they had not been."""
    tokens = token(B=1, T=50, H=2, G=1)
    drafts = [100.0 * x for x in tokens]
    kept, pure = (top1_chunk_cache(1, 50, 1, 32, chunk=16) for _ in range(2))
    for cache in (kept, pure):
        top1_chunk_fill(*(x[:, :first] for x in tokens[1:]), cache, chunk=16)

    def run(tensors: list[Tensor], cache: dict[str, Tensor], start: int, end: int) -> Tensor:
        options = {"chunk": 16, "mode": mode, "backend": backend}
        steps = [[x[:, t : t + 1] for x in tensors] for t in range(start, end)]
        return torch.cat([top1_chunk_step(*x, cache, t, **options) for t, x in enumerate(steps, start)], 1)

    expected = run(tokens, pure, first, 50)
    run(tokens, kept, first, first + 2)
    run(drafts, kept, first + 2, 50)
    run(drafts, kept, first + 1, first + 3)
    assert torch.equal(run(tokens, kept, first, 50), expected)
    assert all(torch.equal(kept[name], pure[name]) for name in ("k", "v", "sums"))
    whole = top1_chunk(*tokens, chunk=16, mode=mode, backend="eager")[:, first:]
    torch.testing.assert_close(expected, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_batch_gives_an_empty_result(op, backend, packed):
    q, k, v = (x.requires_grad_() for x in token(B=0, T=20))
    segments = torch.zeros(0, 20, dtype=torch.int64) if packed else None
    o = op(q, k, v, segments=segments, backend=backend)
    assert o.shape == q.shape
    assert o.dtype == q.dtype
    assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_has_empty_choices_and_steps(backend):
    q, k, v = token(B=0, T=20)
    choice = top1_chunk_choice(q, k, remote=3, backend=backend)
    assert (choice.shape, choice.dtype) == ((0, 20, 4, 3), torch.int32)
    assert top1_element_choice(q, k, backend=backend).shape == (0, 20, 4)
    cache = top1_chunk_cache(0, 21, 2, 32, chunk=16)
    top1_chunk_fill(k, v, cache, chunk=16)
    step = top1_chunk_step(*(x[:, :1] for x in (q, k, v)), cache, 20, chunk=16, backend=backend)
    assert step.shape == (0, 1, 4, 32)


@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_an_empty_batch_has_empty_weights(mode):
    q, k, _ = (x.requires_grad_() for x in token(B=0, T=20))
    weights = top1_chunk_weights(q, k, chunk=16, mode=mode)
    assert weights.shape == (0, 4, 20, 20)
    assert [x.shape for x in torch.autograd.grad(weights.sum(), (q, k))] == [q.shape, k.shape]
    assert top1_element_weights(q, k).shape == (0, 4, 20, 20)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("new", "change", "message"),
    [
        (token(T=20, H=0), {}, r"q \(2, 20, 0, 32\) must be"),
        (token(T=20, G=0), {}, r"k \(2, 20, 0, 32\) must be"),
        (token(T=20, K=0), {}, r"q \(2, 20, 4, 0\) must be"),
        (token(T=0), {}, r"q \(2, 0, 4, 32\) must be"),
        ([x.long() for x in token(T=20)], {}, "q must be floating point, not torch.int64"),
        ([x.bool() for x in token(T=20)], {}, "q must be floating point, not torch.bool"),
        ([token()[0], token()[1].to("meta"), token()[2]], {}, "k is torch.float32 on meta, q is torch.float32 on cpu"),
        ([*token()[:2], token()[2].to("meta")], {}, "v is torch.float32 on meta"),
        (token(), {"segments": torch.zeros(2, 1, dtype=torch.int64, device="meta")}, "segments is on meta"),
        *((token(), {"scale": scale}, "scale must be positive") for scale in (float("inf"), float("nan"), "1", True)),
    ],
    ids=lambda x: str(x)[:24],
)
def test_both_ops_name_what_does_not_fit(op, new, change, message):
    with pytest.raises(ConfigError, match=message):
        op(*new, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"chunk": chunk}, "chunk must be a power of two") for chunk in (16.0, "128", None, True)),
        *(({"remote": remote}, "remote must be an integer of at least 1") for remote in (1.5, True, "1")),
        ({"cu_seqlens": torch.tensor([0, 20], device="meta")}, "cu_seqlens is on meta, q is on cpu"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_options_of_another_type_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        top1_chunk(*token(B=1, T=20), **change)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_one_graph_serves_every_length(op):
    compiled = torch.compile(
        lambda q, k, v: op(q, k, v, scale=0.2, backend="eager"), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for length in (20, 30):
        new = token(T=length)
        torch.testing.assert_close(compiled(*new), op(*new, scale=0.2, backend="eager"))

"""Derivatives that the ops do not have are refused in plain words, never wrong and never zero."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from basecap.errors import ConfigError
from basecap.ops import top1_chunk, top1_chunk_choice, top1_element
from basecap.ops._dispatch import interpreted
from basecap.ops._recurrence.operators import recur
from basecap.ops.channel_delta_rule import channel_delta_rule as channel_delta_rule_op
from basecap.ops.channel_delta_rule.triton_chunks.operators import scan as channel_delta_rule
from basecap.ops.delta_rule import delta_rule
from basecap.ops.forgetting_attention import forgetting_attention
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.long_convolution import long_convolution
from basecap.ops.selective_scan import selective_scan
from basecap.ops.short_convolution import short_convolution
from basecap.ops.ssd import ssd
from basecap.ops.taylor_attention import taylor_attention
from basecap.ops.token_choice import index_divergence
from basecap.ops.wkv4 import wkv4
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7
from basecap.ops.wkv7.triton_chunks.operators import scan as wkv7_chunks

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of what vmap runs one by one
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # forward mode's own
]

T, H, K = 6, 1, 16


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


heads, rows, channels = draw(1, T, H, K), draw(1, T, K), draw(K)
decays, bonus = -draw(1, T, H).abs(), draw(H, K)
taps, vocabulary, rates, reads = draw(K, 4), draw(9, K), -draw(K, 4).abs(), draw(1, T, 4)
kernels = partial(pytest.param, marks=in_interpreter)

#: Functions of one tensor, by ops in an implementation that has a backward pass of its own.
OPS = [
    pytest.param(lambda x: top1_chunk(x, x, x, chunk=16), heads, id="top1_chunk"),
    pytest.param(lambda x: top1_element(heads, heads, x), heads, id="top1_element"),
    pytest.param(lambda x: top1_element(x, x, heads), heads, id="top1_element scores"),
    pytest.param(lambda x: selective_scan(x, x.abs(), rates, reads, reads)[0], rows, id="scan"),
    pytest.param(lambda x: short_convolution(x, taps), rows, id="short_convolution"),
    pytest.param(lambda x: wkv4(x, x, channels.abs(), channels)[0], rows, id="wkv4"),
    pytest.param(lambda x: wkv4(x, rows, channels.abs(), channels)[0], rows, id="wkv4 keys"),
    pytest.param(lambda x: linear_cross_entropy(x, vocabulary, torch.arange(T)[None]), rows, id="cross_entropy"),
    pytest.param(lambda x: index_divergence(x, x[:, :, 0], x[:, :, :, 0], x, x), heads, id="index_divergence"),
    kernels(lambda x: delta_rule(x, x, x, decays.exp(), decays, backend="triton")[0], heads, id="delta_rule kernels"),
    kernels(lambda x: ssd(x, x, x, decays, backend="triton")[0], heads, id="ssd kernels"),
    kernels(
        lambda x: forgetting_attention(x, x, x, decays, backend="triton"), heads, id="forgetting_attention kernels"
    ),
    kernels(lambda x: taylor_attention(x, x, x, backend="triton"), heads, id="taylor kernels"),
    kernels(lambda x: wkv6(x, x, x, -heads.abs(), bonus, backend="triton")[0], heads, id="wkv6 kernels"),
    kernels(lambda x: long_convolution(x, taps.T, backend="triton"), draw(1, 65, K), id="long_convolution kernels"),
    kernels(lambda x: short_convolution(x, taps, backend="triton"), rows, id="short_convolution kernels"),
]

long, gates = draw(1, 140, H, K).double(), -draw(1, 140, H).abs().double()  # two blocks of queries
#: Functions of one tensor, by ops that plain PyTorch differentiates as it does any other code.
PLAIN = [
    pytest.param(lambda x: delta_rule(x, x, x / 9, gates.exp(), gates)[0], long, id="delta_rule"),
    pytest.param(lambda x: channel_delta_rule_op(x, x, x / 9, gates.exp(), -long.abs())[0], long, id="by channel"),
    pytest.param(lambda x: forgetting_attention(x, x, x, gates), long, id="forgetting_attention"),
    pytest.param(lambda x: ssd(x, x, x, gates)[0], long, id="ssd"),
    pytest.param(lambda x: taylor_attention(x, x, x), long, id="taylor"),
    pytest.param(lambda x: wkv6(x, x, x, -long.abs(), bonus.double())[0], long, id="wkv6"),
    pytest.param(lambda x: wkv7(x, -long.abs(), x, x, x / 9, x / 9)[0], long, id="wkv7"),
]
every_op = pytest.mark.parametrize(("op", "x"), OPS)


@every_op
def test_transforms_name_what_works(op, x):
    for transformed in (
        lambda: torch.func.grad(lambda x: op(x).sum())(x),
        lambda: torch.func.vjp(op, x),
        lambda: torch.func.jacrev(op)(x),
        lambda: torch.func.vmap(torch.func.grad(lambda x: op(x).sum()))(x[None]),
        lambda: torch.func.grad(lambda x: torch.func.vmap(op)(x).sum())(x[None]),
    ):
        with pytest.raises(ConfigError, match=r"cannot be transformed by torch\.func .* take gradients with torch"):
            transformed()


def test_compiled_transforms_are_no_zero():
    gradient = torch.func.grad(lambda x: top1_element(x, heads, heads).sum())
    with pytest.raises(ConfigError, match=r"top1_element cannot be transformed by torch\.func"):
        torch.compile(gradient, backend="eager")(heads)


@pytest.mark.parametrize(("op", "x"), PLAIN)
def test_plain_pytorch_has_every_derivative(op, x):
    slope = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(op(slope).square().sum(), slope)
    torch.testing.assert_close(torch.func.grad(lambda x: op(x).square().sum())(x), wanted)
    torch.testing.assert_close(torch.func.vmap(op)(x[None])[0], op(x))
    along = torch.ones_like(x)
    torch.testing.assert_close(torch.func.jvp(lambda x: op(x).square().sum(), (x,), (along,))[1], wanted.sum())
    _, once = torch.autograd.functional.hvp(lambda x: op(x).square().sum(), x, along)
    _, twice = torch.func.jvp(torch.func.grad(lambda x: op(x).square().sum()), (x,), (along,))
    torch.testing.assert_close(twice, once)


@every_op
def test_forward_mode_is_no_zero(op, x):
    with pytest.raises(ConfigError, match=r"torch\.autograd\.grad"):
        torch.func.jvp(op, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(ConfigError, match=r"forward-mode.*torch\.autograd\.grad"):
        op(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(("op", "x"), [each for each in OPS if each.id != "short_convolution"])
def test_second_derivatives_are_refused(op, x):
    """Beside others that are there, which a pass that leaves these out would return alone."""
    with pytest.raises(ConfigError, match="has no second derivatives; differentiate it once"):
        torch.autograd.functional.hvp(lambda x: op(x).square().sum() + x.pow(3).sum(), x, x)


@every_op
def test_batched_gradients_are_those_one_by_one_or_refused(op, x):
    x = x.clone().requires_grad_()
    y = op(x)
    weights = torch.stack([y.detach() + 1, y.detach()])
    wanted = [torch.autograd.grad(y, x, weight, retain_graph=True)[0] for weight in weights]
    try:
        (found,) = torch.autograd.grad(y, x, weights, is_grads_batched=True)
    except ConfigError as error:
        assert "has no batched gradients (is_grads_batched, vectorize); take them one by one" in str(error)
    else:
        torch.testing.assert_close(found, torch.stack(wanted))


@in_interpreter
@pytest.mark.parametrize(
    "op",
    [
        lambda x: recur(x, -x.abs(), x, x, None, None, torch.zeros(1, H, K, K), None),
        lambda x: wkv7_chunks(x, -x.abs(), x, x, x, x, None, None),
        lambda x: channel_delta_rule(x, x, x, x, -x.abs(), None, None),
    ],
    ids=["by tokens", "wkv7 by chunks", "the delta rule by channel"],
)
def test_the_recurrences_of_rwkv_7_and_delta_rules_have_neither_batched_nor_second_derivatives(op):
    x = heads.clone().requires_grad_()
    o, *_ = op(x)
    with pytest.raises(ConfigError, match="has no batched gradients"):
        torch.autograd.grad(o, x, o.detach()[None], is_grads_batched=True, retain_graph=True)
    with pytest.raises(ConfigError, match="has no second derivatives"):
        torch.autograd.grad(torch.autograd.grad(o.sum(), x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize(
    ("op", "x"),
    [
        (lambda x: top1_element(x, x, x), heads),
        (lambda x: selective_scan(x, x.abs(), rates, *reads.expand(2, len(x), T, 4))[0], rows),
        (lambda x: wkv4(x, x, channels.abs(), channels)[0], rows),
    ],
    ids=["top1_element", "scan", "wkv4"],
)
def test_mapped_ops_have_the_gradients_of_their_batches(op, x):
    """Inside of `vmap` no tensor says that it wants a gradient."""
    x = torch.cat([x, 0.5 * x])
    gradients = []
    for run in (op, lambda x: torch.func.vmap(op)(x[:, None])[:, 0]):
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(run(leaf).square().sum(), leaf)
    torch.testing.assert_close(*gradients)


def test_lists_of_tensors_are_not_mapped():
    for op in (lambda x: top1_chunk(x, x, x, chunk=16), lambda x: top1_chunk_choice(x, x, chunk=16)):
        with pytest.raises(ConfigError, match=r"torch\.func .* give it a batch instead of vmap"):
            torch.func.vmap(op)(heads[None])


def test_what_no_derivative_is_taken_of_runs_beside_others():
    beside = torch.func.grad(lambda x: (x.square() * top1_chunk(heads, heads, heads, chunk=16)).sum())(heads)
    torch.testing.assert_close(beside, 2 * heads * top1_chunk(heads, heads, heads, chunk=16))

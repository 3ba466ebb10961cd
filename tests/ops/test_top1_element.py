"""Top-1 element selection against its definition in float64: plain PyTorch anywhere, kernels by interpreter or GPU."""

import random
import secrets

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from basecap.errors import ConfigError
from basecap.ops import top1_element, top1_element_choice, top1_element_step, top1_element_weights
from basecap.ops._dispatch import interpreted
from basecap.ops.top1_element import operators, reference
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate
from tests.ops._choices import assert_element_choice

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
KERNELS = [
    pytest.param("cpu", torch.float32, marks=in_interpreter, id="interpreter"),
    *(pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: B, T, H, G, K, segments
CASES = [
    (2, 90, 4, 2, 32, True),
    (1, 150, 2, 2, 40, False),
    (1, 1, 1, 1, 32, False),
    (2, 70, 4, 1, 64, False),
    (1, 90, 2, 1, 100, True),
    (1, 150, 2, 1, 128, False),
    (1, 80, 1, 1, 256, False),
]


def draw(B: int, T: int, H: int, G: int, K: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T + K)
    return [torch.randn(B, T, n, K, generator=generator, dtype=torch.float64) for n in (H, G, G, H)]


def cut(case: tuple) -> Tensor | None:
    if not case[5]:
        return None
    return (torch.rand(case[0], case[1], generator=torch.Generator().manual_seed(1)) < 0.05).long().cumsum(1)


def gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    o = function(*leaves)
    return [o, *torch.autograd.grad(o, leaves, inputs[3])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_pytorch_is_the_definition(case):
    inputs, segments = draw(*case[:5]), cut(case)
    found = gradients(lambda q, k, v: top1_element(q, k, v, segments=segments), inputs)
    truth = gradients(lambda q, k, v: reference.top1_element(q, k, v, case[4] ** -0.5, segments), inputs)
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_as_accurate_as_plain_pytorch(case, device, dtype, poisoned):
    inputs = [x.to(device, dtype) for x in draw(*case[:5])]
    segments = cut(case)
    there = None if segments is None else segments.to(device)
    choice, other = (top1_element_choice(*inputs[:2], segments=there, backend=b) for b in ("triton", "eager"))
    assert_element_choice(choice, *inputs[:2], there, "the kernels' choice")
    assert_element_choice(other, *inputs[:2], there, "plain PyTorch's")
    hard = F.one_hot(choice.long().cpu(), case[1]).double().transpose(1, 2)
    wide = [x.double().cpu() for x in inputs]
    truth = gradients(lambda q, k, v: reference.top1_element(q, k, v, case[4] ** -0.5, segments, hard), wide)
    plain, found = (
        gradients(lambda q, k, v, b=backend: top1_element(q, k, v, segments=there, backend=b), inputs)
        for backend in ("eager", "triton")
    )
    for name, x, y, z in zip(("o", "dq", "dk", "dv"), found, plain, truth, strict=True):
        assert_as_accurate(name, x, y, z)


class Watching(TorchDispatchMode):
    """Sees operators, so that they are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("cpu", torch.float32, SDPBackend.FLASH_ATTENTION),
        pytest.param("cuda", torch.float16, SDPBackend.FLASH_ATTENTION, marks=requires_gpu),
        pytest.param("cuda", torch.bfloat16, SDPBackend.FLASH_ATTENTION, marks=requires_gpu),
        pytest.param("cuda", torch.bfloat16, SDPBackend.CUDNN_ATTENTION, marks=requires_gpu),
    ],
)
def test_fused_attention_is_part_of_the_node_with_the_numbers_of_operators(device, dtype, kernel):
    inputs = [x.to(device, dtype) for x in draw(2, 300, 2, 2, 64)]
    with sdpa_kernel([kernel, SDPBackend.MATH]):
        with Watching():  # first: what is decided here does not hold elsewhere
            expected = gradients(top1_element, inputs)
        found = gradients(top1_element, inputs)
    names = [{node.name() for node, _ in x[0].grad_fn.next_functions if node is not None} for x in (found, expected)]
    assert names[0] == {"torch::autograd::AccumulateGrad"} != names[1]
    for x, y in zip(found, expected, strict=True):
        # A GPU adds dq in varying order.
        assert (x - y).abs().max() <= (0 if device == "cpu" else 2**-7 * y.abs().max())


@pytest.mark.parametrize("how", ["autocast", "segments", "heads", "channels"])
def test_other_attention_is_not_part_of_the_node(how: str):
    inputs = [x.float() for x in draw(1, 40, 4, 2 if how == "heads" else 4, 20 if how == "channels" else 32)]
    segments = torch.arange(40)[None] // 9 if how == "segments" else None
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = gradients(lambda *x: top1_element(*x, segments=segments), inputs)
        with Watching():
            expected = gradients(lambda *x: top1_element(*x, segments=segments), inputs)
    inner = {node.name() for node, _ in found[0].grad_fn.next_functions if node is not None}
    assert inner != {"torch::autograd::AccumulateGrad"}
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_choices_are_best_whatever_the_input(backend, device, dtype, poisoned):
    """Another seed each time: the message names it."""
    seed = secrets.randbits(60)
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(4):
        B, T, G, K = dice.choice([1, 2]), dice.randint(1, 150), dice.choice([1, 2]), dice.choice([16, 40, 64, 256])
        H, packed = G * dice.choice([1, 2]), dice.random() < 0.5
        q, k = (torch.randn(B, T, n, K, generator=generator).to(device, dtype) for n in (H, G))
        segments = (torch.rand(B, T, generator=generator) < 0.03).long().cumsum(1).to(device) if packed else None
        choice = top1_element_choice(q, k, segments=segments, backend=backend)
        assert_element_choice(choice, q, k, segments, f"seed {seed}, {(B, T, H, G, K)=}, {packed=}")


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
def test_ties_go_to_the_earliest(backend):
    # Whole numbers, so that equal scores are equal in any order of summation.
    q, k, v, _ = (x.float().round() for x in draw(1, 80, 1, 1, 32))
    assert not top1_element_choice(q, k[:, :1].expand_as(k), backend=backend).any()
    o = top1_element(q, k[:, :1].expand_as(k), v, backend=backend)
    assert torch.equal(o, v[:, :1].expand_as(v))


def test_weights_are_the_choice():
    q, k, v, _ = draw(1, 40, 2, 1, 32)
    weights = top1_element_weights(q, k)
    torch.testing.assert_close(torch.einsum("bhts,bsk->bthk", weights, v[:, :, 0]), top1_element(q, k, v))
    assert torch.equal(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_decoding_equals_the_whole_sequence():
    q, k, v, _ = draw(2, 30, 4, 2, 32)
    cache = {"k": torch.zeros_like(k), "v": torch.zeros_like(v)}
    steps = [top1_element_step(*(x[:, t : t + 1] for x in (q, k, v)), cache, t) for t in range(30)]
    torch.testing.assert_close(torch.cat(steps, 1), top1_element(q, k, v))
    with pytest.raises(ConfigError, match="full"):
        top1_element_step(*(x[:, :1] for x in (q, k, v)), cache, 30)


def test_operators_keep_their_contracts():
    q, k, v, _ = (x[0].float() for x in draw(1, 30, 2, 1, 32))
    first = torch.zeros(30, dtype=torch.int32)
    choice = operators.choose(q, k, first, 30, "eager")
    torch.library.opcheck(operators.choose.overload, (q, k, first, 30, "eager"))
    torch.library.opcheck(operators.gather.overload, (v.requires_grad_(), choice, "eager"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "scale must be positive"),
        ({"segments": torch.zeros(2, 20, dtype=torch.int64)}, r"segments \(2, 20\)"),
        ({"v": torch.zeros(1, 19, 1, 32)}, r"v \(1, 19, 1, 32\)"),
        ({"v": torch.zeros(1, 20, 1, 32).double()}, "v is torch.float64"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "q": torch.zeros(1, 20, 2, 32),
        "k": torch.zeros(1, 20, 1, 32),
        "v": torch.zeros(1, 20, 1, 32),
        **change,
    }
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ConfigError, match=message):
        top1_element(q, k, v, **arguments)

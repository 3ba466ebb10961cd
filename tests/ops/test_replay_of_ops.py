"""Records of every op with kernels: Triton's interpreter runs the kernels on the addresses that a record gives them."""

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from basecap.bench import launch
from basecap.bench.launch import CASES
from basecap.ops import _dispatch, _replay, ssd_mimo, top1_chunk
from basecap.ops._dispatch import interpreted
from basecap.ops._replay import record, recorder
from basecap.ops.channel_delta_rule.triton_chunks import operators as channel_delta_rule
from basecap.ops.top1_chunk.operators import attend, choose, choose_and_attend
from basecap.ops.wkv7.triton_chunks import operators as wkv7
from basecap.testing.check_op import OPS

#: Tokens by the op's case: several chunks where that is quick.
TOKENS = {
    "delta rule": 17, "delta rule, decoupled": 20, "forgetting attention": 40, "indexer's loss, chosen tokens": 30,
    "linear cross entropy": 20, "long convolution": 20, "selective scan": 5, "short convolution": 20, "ssd": 40,
    "ssd mimo": 20,
    "taylor attention": 40, "top1-chunk exact": 40, "top1-chunk approx": 40, "top1-element": 40, "wkv4": 20, "wkv6": 20,
    "wkv6, values in parts": 20, "wkv6 by tokens, heads of 97": 3, "wkv7": 20,
}  # fmt: skip
#: Operators of ops that only a GPU runs by chunks.
SCANS = {"delta rule, decoupled": channel_delta_rule.scan, "wkv7": wkv7.scan}
#: Ops as models call them, without those of PyTorch's kernels.
LAUNCHED = {
    name: case
    for name, case in CASES.items()
    if name not in ("attention", "attention window", "flash-attention-2", "selected_attention")
}
#: Those without operations of PyTorch around their node of autograd, each of which a backward pass waits for.
ONE_NODE = {"ssd", "taylor_attention", "top1_element", "top1_chunk approx", "top1_chunk exact", "wkv4"}
ACCUMULATE = "torch::autograd::AccumulateGrad"
PACKED = LAUNCHED.keys() - {"linear_cross_entropy", "long_convolution", "ssd_mimo", "taylor_attention"}
ordinary = GridExecutor.__call__

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


class Launcher:
    """Stands for the launcher of a compiled kernel. Counts its calls, which a record makes none of, and launches."""

    dispatched = launched = 0

    def __init__(self, executor: GridExecutor, options: Mapping[str, Any], dtypes: list[torch.dtype | None]) -> None:
        def launch(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            Launcher.launched += 1
            with _disable_current_modes():
                tensors = [arg if dtype is None else _at(arg, dtype) for arg, dtype in zip(given, dtypes, strict=True)]
                ordinary(executor, *tensors, **options)

        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        Launcher.dispatched += 1
        self.launch(x, y, z, stream, *given)


def _at(address: int | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(address, Tensor) or not address:
        return address if isinstance(address, Tensor) else torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


def _launch(executor: GridExecutor, *given: Any, **options: Any) -> None:
    dtypes = [x.dtype if isinstance(x, Tensor) else None for x in given]
    Launcher(executor, options, dtypes)(1, 1, 1, 0, *given)


def _called(name: str, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return results and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    found = SCANS[name](*leaves, None, None)[:2] if name in SCANS else OPS[name].kernels(*leaves)
    found = [found] if isinstance(found, Tensor) else list(found)
    grads = torch.autograd.grad(sum(x.square().sum() for x in found), leaves)
    return [*(x.detach() for x in found), *grads]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record launches of `Launcher`, on the CPU, also of kernels that "auto" leaves out."""
    monkeypatch.setattr(ssd_mimo.triton_chunks, "untried", lambda *given: None)
    monkeypatch.setattr(_replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(recorder, "launcher_class", lambda: Launcher)
    monkeypatch.setattr(recorder, "driver_utilities", lambda: None)
    monkeypatch.setattr(record, "current_stream", lambda: lambda device: 0)
    monkeypatch.setattr(GridExecutor, "__call__", _launch)
    Launcher.dispatched = Launcher.launched = 0


@pytest.mark.parametrize("name", TOKENS)
def test_the_third_call_is_a_replay_with_the_bits_of_the_first(name: str):
    generator = torch.Generator().manual_seed(0)
    first, second = (
        OPS[name].inputs(lambda *shape: torch.randn(shape, generator=generator), TOKENS[name]) for _ in range(2)
    )
    expected = _called(name, first)
    _called(name, second)
    assert Launcher.dispatched
    Launcher.dispatched = 0
    found = _called(name, first)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("whole", "packed", "parts") for name in LAUNCHED if kind != "packed" or name in PACKED],
)
def test_nothing_goes_through_the_dispatcher_in_bfloat16(kind: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever has to be copied: inputs in float32, numbers of segments, and inputs that are parts of wider tensors."""
    case, more = LAUNCHED[name], {"segments": torch.arange(40).expand(2, 40) // 16} if kind == "packed" else {}
    monkeypatch.setattr(launch, "VOCABULARY", 100)  # its products in 16 bits take seconds on some processors
    monkeypatch.setattr(_dispatch, "_unsupported", lambda device, dtype, shared: None)
    monkeypatch.setattr(_dispatch, "_off_the_gpu", lambda x: None)
    monkeypatch.setattr("tests.ops.test_replay_of_ops.ordinary", lambda executor, *given, **options: None)
    drawn = case.inputs(torch.zeros, 2, 40)
    inputs = [x.bfloat16() if x.is_floating_point() and name not in case.wide else x for name, x in drawn.items()]
    if kind == "parts":
        inputs = [torch.stack([x, x], 1)[:, 0] if x.is_floating_point() and x.dim() > 2 else x for x in inputs]
    for _ in range(3):
        Launcher.dispatched = Launcher.launched = 0
        leaves = [x.detach().requires_grad_() for x in inputs if x.is_floating_point()]
        rest = iter(leaves)
        out = case.op(*(next(rest) if x.is_floating_point() else x for x in inputs), **more)
        out = out if isinstance(out, Tensor) else out[0]
        torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
    assert Launcher.launched and Launcher.dispatched == 0
    inner = {node.name() for node, _ in out.grad_fn.next_functions if node is not None} - {ACCUMULATE}
    # Packed Top-1 elements have attention with a mask around their node.
    assert not inner or name not in ONE_NODE - ({"top1_element"} if kind == "packed" else set()), inner


@pytest.mark.parametrize("mode", ["approx", "exact"])
@pytest.mark.parametrize("graph", [True, False])
def test_a_pass_over_chunks_is_one_record(mode: str, graph: bool):
    """The choice is no record of its own."""
    q, k, v = (torch.randn(1, 64, 2, 16).requires_grad_(graph) for _ in range(3))
    for _ in range(3):
        out = top1_chunk(q, k, v, chunk=16, mode=mode, backend="triton")
    (kind,) = choose_and_attend.replayed.records.values()
    assert kind.replay is not None and (out.grad_fn is not None) == graph
    for parts in (choose, attend):
        assert not parts._direct.replayed.records


#: Operations of PyTorch beside the launches in an op's records, forward and backward.
OPERATIONS = {
    "selective_scan": (2, 2), "ssd": (0, 0), "taylor_attention": (0, 0), "top1_element": (0, 0), "wkv4": (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_pytorch_in_records(name: str, monkeypatch: pytest.MonkeyPatch):
    """A caller in Python waits for each of them."""
    _replay.forget()
    counts, compiled = [], recorder.compile_record

    def count(given, memories, steps, out):
        counts.append(sum(isinstance(step.function, OpOverload) for step in steps))
        return compiled(given, memories, steps, out)

    monkeypatch.setattr(recorder, "compile_record", count)
    monkeypatch.setattr(launch, "D", 64)  # the interpreter takes a minute for all channels
    case = CASES[name]
    leaves = [x.requires_grad_() for x in case.inputs(torch.ones, 1, 20).values()]
    for _ in range(3):
        out = case.op(*leaves, backend="triton")
        out = out if isinstance(out, Tensor) else out[0]
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(counts) == 2
    assert all(found <= most for found, most in zip(counts, OPERATIONS[name], strict=True)), counts

"""The kernels for Hopper GPUs against plain PyTorch, simulated: see `_gluon`."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import interpreted
from basecap.ops.top1_chunk import eager
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.testing.tolerance import assert_as_accurate
from tests.ops import _gluon

# What the simulated kernels do not do, others do in Triton's interpreter.
pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned"),
]

PACKED = [1, 127, 128, 129, 640]


def load(name: str) -> ModuleType:
    """Return a module of the operator."""
    return importlib.import_module(f"basecap.ops.top1_chunk.{name}")


def simulated(name: str) -> ModuleType:
    return _gluon.simulated(Path(load("gluon_kernels").__file__).with_name(f"{name}.py"))


def draw(lengths: list[int], H: int, G: int, K: int) -> tuple[Tensor, ...]:
    """Return q, k, v, do in float32, the grid and each token's own chunk."""
    N = sum(lengths)
    generator = torch.Generator().manual_seed(N + K)
    q, k, v, do = (torch.randn(N, count, K, generator=generator) for count in (H, G, G, H))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    return F.rms_norm(q, (K,)), F.rms_norm(k, (K,)), v, do, *chunk_grid(k[None], 128, None, bounds)


@pytest.mark.parametrize(
    ("K", "lengths", "heads", "remote", "programs", "chosen"),
    [
        (64, [300], (2, 1), 1, 132, None),
        (128, [600], (2, 2), 1, 2, None),
        (64, PACKED, (2, 2), 1, 6, None),
        (128, PACKED, (2, 2), 1, 6, None),
        (128, PACKED, (1, 1), 2, 3, None),
        (64, [1200], (1, 1), 1, 3, 0),
    ],
    ids=["each chunk its program", "many chunks a program", "packed 64", "packed", "two chosen", "all choose one"],
)
def test_backward_is_as_accurate_as_plain_pytorch(K, lengths, heads, remote, programs, chosen, monkeypatch):
    launch = load("gluon_kernels.launch")
    q, k, v, do, grid, own = draw(lengths, *heads, K)
    scale = K**-0.5
    choice = eager.choose(q, k, grid, own, 128, False, scale, remote)
    if chosen is not None:
        choice = torch.where(choice >= 0, chosen, choice)
    o, lse, index = launch.attend(q, k, v, choice, grid, own, 128, scale)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=programs))
    monkeypatch.setattr(launch, "kernels_backward", simulated("kernels_backward"))
    found = launch.attend_backward(do, (q, k, v, o, lse, index, choice, grid, own), 128, scale)

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype) for x in (q, k, v)]
        o, lse, index = eager.attend(*inputs, choice, grid, own, 128, scale)
        return eager.attend_backward(do.to(dtype), (*inputs, o, lse, index, choice, grid, own), 128, scale)

    for name, *values in zip("qkv", found, plain(torch.float32), plain(torch.float64), strict=True):
        assert_as_accurate(f"d{name}", *values)


@pytest.mark.parametrize("hopper", [False, True])
def test_dq_is_the_same_whether_memory_adds_or_a_kernel(hopper, monkeypatch):
    launch = load("gluon_kernels.launch" if hopper else "triton_kernels.launch")
    lengths = [129, 300] if hopper else [33, 100]
    q, k, v, do, grid, own = draw(lengths, 2, 1, 64)
    # In float32 the other kernels cut longer chunks into blocks, which have slots in any case.
    chunk = 128 if hopper else 32
    if not hopper:
        grid, own = chunk_grid(k[None], chunk, None, torch.tensor([0, 33, 133], dtype=torch.int32))
    choice = eager.choose(q, k, grid, own, chunk, False, 0.125, 1)
    o, lse, index = launch.attend(q, k, v, choice, grid, own, chunk, 0.125)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    if hopper:
        monkeypatch.setattr(launch, "kernels_backward", simulated("kernels_backward"))
    found = []
    for adds in (True, False):
        monkeypatch.setattr(load("triton_kernels.launch"), "_adds_at_once", lambda q, adds=adds: adds)
        found.append(launch.attend_backward(do, (q, k, v, o, lse, index, choice, grid, own), chunk, 0.125))
    for with_memory, with_kernel in zip(*found, strict=True):
        assert torch.equal(with_memory, with_kernel)


def inputs_of_choice(K: int, lengths: list[int], heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return q and k in bfloat16, the grid, each token's own chunk and a choice that is yet to be made."""
    q, k, *_, grid, own = draw(lengths, *heads, K)
    return q.bfloat16(), k.bfloat16(), grid, own, torch.full((*q.shape[:2], 1), -1, dtype=torch.int32)


every_choice = pytest.mark.parametrize(
    ("K", "lengths", "heads"),
    [(K, *case) for K in (64, 128) for case in (([1], (1, 1)), ([385], (4, 2)), ([1200], (1, 1)), (PACKED, (2, 2)))],
)


@every_choice
def test_exact_choice_is_that_of_plain_pytorch(K, lengths, heads):
    """Where scores are bounded. Blocks of queries with larger ones are left to other kernels."""
    q, k, grid, own, choice = inputs_of_choice(K, lengths, heads)
    large = torch.arange(len(q)) // 128 == 2
    q[large] *= 40
    norm = k.float().square().sum(-1).amax(0)
    scale2 = K**-0.5 * load("triton_kernels.launch").LOG2E
    simulated("kernels_exact").choose_exact(q, k, grid, own, norm, choice, 128, scale2)
    expected = eager.choose(q.float(), k.float(), grid, own, 128, True, K**-0.5, 1)
    assert torch.equal(choice[~large], expected[~large])
    assert (choice[large] == -1).all()


@every_choice
def test_approximate_choice_is_that_of_plain_pytorch(K, lengths, heads):
    q, k, grid, own, choice = inputs_of_choice(K, lengths, heads)
    q[200:210] = float("nan")
    rows = (grid[:, :1].long() + torch.arange(128)).clamp(max=len(k) - 1)
    mean = k.float()[rows].mean(1).transpose(0, 1).contiguous()
    means = mean.bfloat16()
    low = (mean - means.float()).bfloat16()
    simulated("kernels_approx").choose_approx(q, means, low, grid, own, choice)
    expected = eager.choose(q.float(), k.float(), grid, own, 128, False, K**-0.5, 1)
    number = ~q[:, 0].isnan().any(-1)
    assert torch.equal(choice[number], expected[number])
    assert (choice[~number] == -1).all()


#: A kernel in which one warpgroup copies 64 numbers, twice, through one place, and another doubles them.
KERNEL = """
def fetch(p_x, s_x, full, empty):
    o = gl.arange(0, 64, layout=None)
    for j in range(2):
        mbarrier.wait(empty, (j & 1) ^ 1)
        async_copy.async_copy_global_to_shared(s_x, p_x + (64 * j + o))
        async_copy.mbarrier_arrive(full, increment_count=False)


def double(p_y, s_x, full, empty):
    o = gl.arange(0, 64, layout=None)
    for j in range(2):
        mbarrier.wait(full, j & 1)
        gl.store(p_y + (64 * j + o), 2 * s_x.load(None))
        mbarrier.arrive(empty)


def double_kernel(p_x, p_y):
    s_x = gl.allocate_shared_memory(gl.float32, [64], None)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=128)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(fetch, (p_x, s_x, full, empty)), (double, (p_y, s_x, full, empty))], [4], [64])
"""


def outcome(path: Path, seed: int) -> str:
    kernel, x, y = _gluon.simulated(path).double_kernel, torch.randn(128), torch.zeros(128)
    kernel.seed = seed
    try:
        kernel[1,](x, y)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "right" if torch.equal(y, 2 * x) else "wrong"


def test_a_right_kernel_is_simulated_to_be_right(tmp_path: Path):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    assert {outcome(path, seed) for seed in range(20)} == {"right"}


@pytest.mark.parametrize(
    "line",
    [
        "        mbarrier.wait(full, j & 1)\n",
        "        mbarrier.wait(empty, (j & 1) ^ 1)\n",
        "        mbarrier.arrive(empty)\n",
        "        async_copy.mbarrier_arrive(full, increment_count=False)\n",
    ],
)
def test_the_simulation_shows_that_a_barrier_is_missing(line: str, tmp_path: Path):
    """Numbers are wrong, or all wait for ever: in some order of events at least."""
    path = tmp_path / "kernel.py"
    assert line in KERNEL
    path.write_text(KERNEL.replace(line, ""))
    assert {outcome(path, seed) for seed in range(20)} != {"right"}

"""What only a GPU can show of Top-1 chunk selection: sizes beyond 32-bit offsets, a million tokens, compiled graphs."""

import functools
import secrets
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops import top1_chunk, top1_chunk_choice
from basecap.ops._dispatch import functions_of, recorded
from basecap.ops.top1_chunk import gluon_kernels, triton_kernels
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.testing.marks import requires_gpu
from tests.ops._choices import Rules, assert_choice


def on_gpu(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), requires_gpu, test)


def draw(T: int, H: int, K: int) -> list[Tensor]:
    """Return q, k, v and do, q and k normalised, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(T)
    q, k, v, do = (torch.randn(1, T, H, K, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [F.rms_norm(q, (K,)), F.rms_norm(k, (K,)), v, do]


def outcome(inputs: list[Tensor], **options) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    o = top1_chunk(q, k, v, chunk=128, backend="triton", **options)
    return [o, *torch.autograd.grad(o, (q, k, v), inputs[3])]


@on_gpu
@pytest.mark.parametrize("K", [64, 256])
def test_offsets_beyond_32_bits(K):
    """The last of many packed sequences comes out as if it were alone."""
    H, length = 4, 4096
    count = 2**31 // (H * K * length) + 2
    inputs = draw(count * length, H, K)
    assert inputs[0].numel() > 2**31
    bounds = length * torch.arange(count + 1, dtype=torch.int32, device="cuda")
    for mode in ("exact", "approx"):
        alone = outcome([x[:, -length:].clone() for x in inputs], mode=mode)
        packed = [x[:, -length:].clone() for x in outcome([x.detach() for x in inputs], mode=mode, cu_seqlens=bounds)]
        assert all(torch.equal(x, y) for x, y in zip(packed, alone, strict=True))


@on_gpu
def test_a_million_tokens():
    """Choices of queries all along a row of 2^20 tokens have the largest score in float64, up to rounding."""
    T, H, K, chunk = 2**20, 2, 64, 128
    q, k, v, do = draw(T, H, K)
    choice = top1_chunk_choice(q, k, chunk=chunk, mode="approx", backend="triton")
    means = k.double().unflatten(1, (T // chunk, chunk)).mean(2)
    at = torch.randint(chunk, T, (256,), generator=torch.Generator().manual_seed(0)).to("cuda")
    scores = torch.einsum("bthk,bmhk->bthm", q[:, at].double(), means)
    future = torch.arange(T // chunk, device="cuda") >= (at // chunk)[:, None]
    scores = scores.masked_fill(future[None, :, None], -float("inf"))
    chosen = scores.gather(-1, choice[:, at].long())[..., 0]
    torch.testing.assert_close(chosen, scores.amax(-1), atol=1e-5, rtol=1e-5)
    assert (choice[:, at, :, 0] == scores.argmax(-1)).double().mean() >= 0.99
    assert all(x.isfinite().all() for x in outcome([q, k, v, do], mode="approx"))


@on_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("bounds", [None, [0, 300, 1000]], ids=str)
def test_one_compiled_graph_of_kernels(bounds):
    q, k, v, do = draw(1000, 4, 64)
    packing = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (top1_chunk(q, k, v, chunk=64, cu_seqlens=packing, backend="triton").float() * do).sum()

    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(loss, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    for x, y in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(x, y)


@on_gpu
@pytest.mark.parametrize("lengths", [[3000], [700, 1, 128, 1029]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("remote", [1, 3])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_choices_are_best_whatever_the_input(mode, K, remote, dtype, lengths, poisoned):
    """Another seed each time: the message names it. Some scores are large; one key of a group might make them so."""
    seed = secrets.randbits(60)
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k = (torch.randn(1, sum(lengths), n, K, generator=generator, device="cuda", dtype=dtype) for n in (6, 2))
    q[:, 900:1000] *= 30
    k[:, -1, 1] *= 100
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to("cuda")
    rules = Rules(128, mode, remote, None, segments)
    choice = top1_chunk_choice(q, k, **vars(rules), backend="triton")
    assert_choice(choice, q, k, rules, f"seed {seed}")


@on_gpu
@pytest.mark.parametrize("lengths", [[1], [385], [5001], [1, 127, 128, 129, 640, 1500, 3, 257]], ids=str)
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, (6, 2)), (torch.float16, (2, 2))], ids=str)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_hopper_chooses_as_other_gpus_do(mode, K, dtype, heads, lengths):
    """Both kinds of kernels choose the best chunks, up to rounding; some scores are large."""
    N = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(N)
    q, k = (torch.randn(N, count, K, generator=generator, device="cuda", dtype=dtype) for count in heads)
    q, k = F.rms_norm(q, (K,)), F.rms_norm(k, (K,))
    q[N // 3 : N // 3 + 20] *= 50
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    grid, own = chunk_grid(k[None], 128, None, bounds)
    if reason := gluon_kernels.supports(q, 128):
        pytest.skip(reason)
    inputs = q, k, grid, own, 128, mode == "exact", K**-0.5, 1
    found, expected = (functions_of(family).choose(*inputs) for family in (gluon_kernels, triton_kernels))
    first = grid[own.long(), 2][:, None, None]
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to("cuda")
    for name, choice in (("Hopper's", found), ("other GPUs'", expected)):
        within = torch.where(choice >= 0, choice - first, choice)
        assert_choice(within[None], q[None], k[None], Rules(128, mode, segments=segments), name)
    assert (found == expected).double().mean() >= 0.99


@on_gpu
def test_what_runs_is_recorded():
    q, k, *_ = draw(512, 1, 64)
    with recorded() as ran:
        top1_chunk_choice(q, k, chunk=128)
    reason = gluon_kernels.supports(q, 128)
    expected = "Gluon kernels" if reason is None else f"Triton kernels: no Gluon kernels because {reason}"
    assert ran == {"top1_chunk": expected}


@on_gpu
@pytest.mark.parametrize("mode", ["exact", "approx"])
@pytest.mark.parametrize("K", [64, 128])
def test_queries_that_are_no_numbers_choose_nothing(K, mode):
    """They fill a block of 128, half of what some kernels take at a time."""
    q, k, *_ = draw(512, 1, K)
    q[:, 128:256], q[:, 300:310] = float("nan"), float("nan")
    choice = top1_chunk_choice(F.rms_norm(q, (K,)), F.rms_norm(k, (K,)), chunk=128, mode=mode, backend="triton")[
        0, :, 0
    ]
    lost = q[0].isnan().any(-1)
    assert (choice[lost] == -1).all()
    assert (choice[~lost][128:] >= 0).all()


@on_gpu
@pytest.mark.parametrize("lengths", [[1], [385], [5001], [1, 127, 128, 129, 640, 1500, 3, 257]], ids=str)
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, (6, 2)), (torch.float16, (2, 2))], ids=str)
@pytest.mark.parametrize("remote", [1, 2])
@pytest.mark.parametrize("K", [64, 128])
def test_hopper_goes_back_as_other_gpus_do(K, remote, dtype, heads, lengths, monkeypatch):
    """Both kinds of kernels have the same gradients, of queries within a wider tensor too; one chunk is popular."""
    (H, G), N = heads, sum(lengths)
    generator = torch.Generator("cuda").manual_seed(N)
    q, k, v, do = (torch.randn(N, n, K + 8, generator=generator, device="cuda", dtype=dtype) for n in (H, G, G, H))
    q, k, v, do = q[..., 8:], *(x[..., :K].contiguous() for x in (k, v, do))
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    grid, own = chunk_grid(k[None], 128, None, bounds)
    if reason := gluon_kernels.supports(q, 128):
        pytest.skip(reason)
    launch = functions_of(triton_kernels)
    choice = launch.choose(q, k, grid, own, 128, False, K**-0.5, remote)
    popular = grid[own.long(), 2][:, None].expand(N, H)
    choice[..., 0] = torch.where((choice[..., 0] >= 0) & (choice[..., -1] != popular), popular, choice[..., 0])
    o, lse, index = launch.attend(q, k, v, choice, grid, own, 128, K**-0.5)

    def back(family: ModuleType) -> tuple[Tensor, ...]:
        saved = q, k, v, o, lse, index, choice, grid, own
        return functions_of(family).attend_backward(do, saved, 128, K**-0.5)

    found, again = back(gluon_kernels), back(gluon_kernels)
    monkeypatch.setattr(launch, "_adds_at_once", lambda _: False)
    for x, y, expected in zip(found, again, back(triton_kernels), strict=True):
        assert torch.equal(x, y)
        # Both round ds and the sums once to this dtype.
        assert (x - expected).norm() <= torch.finfo(dtype).eps * expected.norm()

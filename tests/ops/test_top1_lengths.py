"""One launch decodes sequences of any lengths, which are read from a tensor: each as in a step of its own."""

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import top1_chunk, top1_chunk_cache, top1_chunk_fill, top1_chunk_further, top1_chunk_step
from basecap.ops._dispatch import interpreted, recorded
from basecap.ops._selection.draws import with_exact_scores
from basecap.ops.top1_chunk import eager
from basecap.system.cuda_graph import captured
from basecap.testing.marks import requires_gpu
from basecap.testing.tolerance import assert_as_accurate

pytest.importorskip("triton")
in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
KERNELS = [
    pytest.param("cpu", torch.float32, marks=in_interpreter, id="interpreter"),
    *(pytest.param("cuda", dtype, marks=requires_gpu) for dtype in (torch.float32, torch.bfloat16)),
]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

MODES = [("exact", 1), ("exact", 3), ("approx", 1), ("approx", 3)]
CHUNK, ROOM = 16, 96
#: Empty, around the ends of chunks, and with room for one more token.
LENGTHS = [0, 1, 15, 16, 17, 47, 48, ROOM - 1]


def tokens(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of whole sequences, grouped heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(LENGTHS), ROOM, n, 32, generator=generator) for n in (4, 2, 2))
    q, k, v = (x.to(device, dtype) for x in with_exact_scores(q, k, v).values())
    return q, k, v


def held(k: Tensor, v: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Return a cache of the first `lengths` [B] tokens of each sequence; large keys and no numbers are behind them."""
    cache = top1_chunk_cache(len(k), ROOM, k.shape[2], k.shape[3], chunk=CHUNK, dtype=k.dtype, device=k.device)
    top1_chunk_fill(k, v, cache, chunk=CHUNK)
    for name, lived in {"k": lengths, "v": lengths, "sums": lengths // CHUNK}.items():
        x = cache[name]
        behind = torch.arange(x.shape[1], device=x.device) >= lived[:, None]
        x[behind] *= float("nan") if name == "v" else 100
    return cache


def at(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the token after the `lengths` [B] of each sequence, [B, 1, ...]."""
    return x[torch.arange(len(x), device=x.device), lengths][:, None]


def one_by_one(token: list[Tensor], cache: dict[str, Tensor], lengths: Tensor, **options) -> Tensor:
    """Return the outputs of a step of each sequence by itself, with its number of tokens as a Python number."""
    outputs = []
    for row, length in enumerate(lengths.tolist()):
        own = {name: x[row : row + 1] for name, x in cache.items()}
        outputs.append(top1_chunk_step(*(x[row : row + 1] for x in token), own, length, **options))
    return torch.cat(outputs)


@pytest.mark.parametrize(("mode", "remote"), MODES)
@pytest.mark.parametrize(("device", "dtype"), KERNELS)
@pytest.mark.usefixtures("poisoned")
def test_a_launch_for_the_room_is_the_step_of_each_sequence(mode, remote, device, dtype, monkeypatch):
    """Output and cache are the same; on a GPU one graph is replayed for all lengths up to the room."""
    from basecap.ops.top1_chunk.triton_step import launch

    monkeypatch.setattr(launch, "FEWEST", 20)  # a program of the batch reads several chunks, others one
    options = {"chunk": CHUNK, "mode": mode, "remote": remote}
    inputs, lengths = tokens(device, dtype), torch.tensor(LENGTHS, device=device)
    token, cache = [at(x, lengths) for x in inputs], held(*inputs[1:], lengths)
    o = torch.zeros_like(token[0])

    def step() -> None:
        o.copy_(top1_chunk_step(*token, cache, ROOM - 1, lengths=lengths, backend="triton", **options))

    run = captured(step) if device == "cuda" else step
    for shift in range(ROOM if device == "cuda" else 1):
        lengths.copy_((torch.tensor(LENGTHS, device=device) + shift) % ROOM)
        alone, plain, exact = (held(*inputs[1:], lengths) for _ in range(3))
        for x, now in zip([*token, *cache.values()], [at(x, lengths) for x in inputs] + [*alone.values()], strict=True):
            x.copy_(now)
        run()
        torch.testing.assert_close(o, one_by_one(token, alone, lengths, backend="triton", **options))
        for name, x in cache.items():
            torch.testing.assert_close(x, alone[name], rtol=0, atol=0, equal_nan=True)
        beside = top1_chunk_step(*token, plain, ROOM - 1, lengths=lengths, backend="eager", **options)
        exact = {name: x.double() for name, x in exact.items()}
        truth = one_by_one([x.double() for x in token], exact, lengths, backend="eager", **options)
        assert_as_accurate(f"lengths {lengths.tolist()}", o, beside, truth)


@pytest.mark.parametrize(("mode", "remote"), MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_gpu)])
def test_further_tokens_stand_behind_those_of_each_sequence(mode, remote, dtype, device, monkeypatch):
    """They attend as in whole sequences; the sums of chunks that become full are those of a prompt with them."""
    monkeypatch.setattr(eager, "SLICE", 3 * 4 * 20 * ROOM)  # three sequences at a time
    inputs, options = tokens(device, dtype), {"chunk": CHUNK, "mode": mode, "remote": remote}
    lengths, count = torch.tensor([0, 1, 15, 16, 17, 47, 48, ROOM - 20], device=device), 20
    row = torch.arange(len(LENGTHS), device=device)[:, None]
    place = lengths[:, None] + torch.arange(count, device=device)
    cache, expected = held(*inputs[1:], lengths), held(*inputs[1:], lengths + count)
    cache["v"].nan_to_num_(100.0)
    new, alone = [x[row, place] for x in inputs], {name: x[5:6].clone() for name, x in cache.items()}
    o = top1_chunk_further(*new, cache, ROOM - count, lengths=lengths, **options)
    for name, lived in {"k": lengths + count, "v": lengths + count, "sums": (lengths + count) // CHUNK}.items():
        kept = torch.arange(cache[name].shape[1], device=device) < lived[:, None]
        torch.testing.assert_close(cache[name][kept], expected[name][kept], rtol=0, atol=0)
    plain, exact = (
        top1_chunk(*whole, backend="eager", **options)[row, place] for whole in (inputs, [x.double() for x in inputs])
    )
    assert_as_accurate("further tokens", o, plain, exact)
    o = top1_chunk_further(*(x[5:6] for x in new), alone, 47, **options)
    assert_as_accurate("those of one sequence", o, plain[5:6], exact[5:6])


def test_lengths_are_on_the_device_of_the_cache():
    inputs, lengths = tokens("cpu", torch.float32), torch.tensor(LENGTHS)
    token, cache = [at(x, lengths) for x in inputs], held(*inputs[1:], lengths)
    with pytest.raises(ConfigError, match="lengths is on meta, k is on cpu; put both on one device"):
        top1_chunk_step(*token, cache, ROOM - 1, lengths=lengths.to("meta"), chunk=CHUNK)


class TestOnGpu:
    pytestmark = requires_gpu

    def test_sequences_of_any_lengths_are_decoded_by_kernels(self):
        inputs, lengths = tokens("cuda", torch.bfloat16), torch.tensor(LENGTHS, device="cuda")
        cache = held(*inputs[1:], lengths)
        with recorded() as ran:
            top1_chunk_step(*(at(x, lengths) for x in inputs), cache, ROOM - 1, lengths=lengths, chunk=CHUNK)
        assert ran == {"top1_chunk_step": "Triton kernels"}

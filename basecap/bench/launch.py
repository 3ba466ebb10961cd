"""How long a caller in Python waits for every op to be launched, beside the time that the GPU works on it.

PyTorch's FlashAttention-2 is there to compare with. PyTorch runs the backward pass of a GPU in a thread of its own,
which the caller waits for; in the last pass measured it runs in the caller's.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from basecap.bench.attentions import runs, sdpa
from basecap.ops import recorded, top1_chunk, top1_element
from basecap.ops.attention import attention
from basecap.ops.channel_delta_rule import channel_delta_rule
from basecap.ops.delta_rule import delta_rule
from basecap.ops.forgetting_attention import forgetting_attention
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.long_convolution import long_convolution
from basecap.ops.selected_attention import selected_attention
from basecap.ops.selective_scan import selective_scan
from basecap.ops.short_convolution import short_convolution
from basecap.ops.ssd import ssd
from basecap.ops.ssd_mimo import Heads, Strengths, ssd_mimo
from basecap.ops.taylor_attention import taylor_attention
from basecap.ops.token_choice import index_divergence
from basecap.ops.wkv4 import wkv4
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7, wkv7_bounded
from basecap.system.cuda_graph import captured, milliseconds
from basecap.system.progress import Advance

Row = dict[str, Any]
#: Takes a shape and returns standard normal float32 numbers.
Draw = Callable[..., Tensor]
Inputs = dict[str, Tensor]

#: Sequences and tokens.
SHAPES = ((1, 2048), (32, 2048))
#: A launch may take this many times the work of the GPU, or this many milliseconds.
RATIO, SHORT = 2.0, 0.3
#: Calls timed, and calls before them.
CALLS, WARM_UP = 30, 3
#: What is timed of each op, a row each.
PASSES = ("forward", "forward+backward", "forward+backward, one thread")
#: Width, heads and head size of models of 110M parameters, and their vocabulary.
D, H, K = 768, 12, 64
VOCABULARY = 32_000


class Launched(NamedTuple):
    """An op as a model of width 768 calls it; its inputs are bfloat16 but those in `wide`, which are float32."""

    op: Callable[..., Any]
    inputs: Callable[[Draw, int, int], Inputs]
    wide: tuple[str, ...] = ()


def _heads(draw: Draw, B: int, T: int) -> Inputs:
    return {name: draw(B, T, H, K) for name in ("q", "k", "v")}


def _normalised(draw: Draw, B: int, T: int) -> Inputs:
    q, k, v = _heads(draw, B, T).values()
    return {"q": F.rms_norm(q, (K,)), "k": F.rms_norm(k, (K,)), "v": v}


def _forgetting(draw: Draw, B: int, T: int) -> Inputs:
    return _heads(draw, B, T) | {"log_decay": -0.05 * draw(B, T, H).abs()}


def _delta(draw: Draw, B: int, T: int) -> Inputs:
    q, k, v = _heads(draw, B, T).values()
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    return {"q": q, "k": k, "v": v, "beta": draw(B, T, H).sigmoid(), "log_decay": -0.1 * draw(B, T, H).abs()}


def _channel_delta(draw: Draw, B: int, T: int) -> Inputs:
    return _delta(draw, B, T) | {"log_decay": -0.1 * draw(B, T, H, K).abs()}


def _cross_entropy(draw: Draw, B: int, T: int) -> Inputs:
    hidden, weight = draw(B * T, D), D**-0.5 * draw(VOCABULARY, D)
    return {"hidden": hidden, "weight": weight, "targets": torch.arange(B * T, device=hidden.device) % VOCABULARY}


def _long_convolution(draw: Draw, B: int, T: int) -> Inputs:
    return {"u": draw(B, T, D), "filter": T**-0.5 * draw(T, D)}


def _short_convolution(draw: Draw, B: int, T: int) -> Inputs:
    return {"x": draw(B, T, D), "weight": 0.5 * draw(D, 4), "bias": draw(D)}


def _selective_scan(draw: Draw, B: int, T: int) -> Inputs:
    x, dt = draw(B, T, 2 * D), 0.2 * draw(B, T, 2 * D).abs()
    return {"x": x, "dt": dt, "A": -draw(2 * D, 16).abs(), "B": draw(B, T, 16), "C": draw(B, T, 16)}


def _ssd(draw: Draw, B: int, T: int) -> Inputs:
    q, k = draw(B, T, 1, 128), draw(B, T, 1, 128)
    return {"q": q, "k": k, "v": draw(B, T, 2 * H, K), "log_decay": -0.1 * draw(B, T, 2 * H).abs()}


def _selected(draw: Draw, B: int, T: int) -> Inputs:
    # As Native Sparse Attention makes them: each query reads an eighth of the blocks of 32, its own among them.
    own = torch.arange(T, device=draw(1).device) // 32
    chosen = draw(B, T, H, -(-T // 32)) > 1.15
    chosen |= (own[:, None] == torch.arange(chosen.shape[3], device=own.device))[:, None]
    return _heads(draw, B, T) | {"chosen": chosen, "blocks": own.expand(B, T)}


def _indexed(draw: Draw, B: int, T: int) -> Inputs:
    index = {"index_q": draw(B, T, 4, K), "index_k": draw(B, T, K), "weights": 0.1 * draw(B, T, 4)}
    return index | {"q": draw(B, T, H, K), "k": draw(B, T, H, K)}


def _mimo(draw: Draw, B: int, T: int) -> Inputs:
    q, k, v = draw(B, T, 4, 1, 128), draw(B, T, 4, 1, 128), draw(B, T, 4, H, K)
    decays = {"log_decay": -0.1 * draw(B, T, H).abs(), "now": draw(B, T, H).sigmoid(), "kept": draw(B, T, H).sigmoid()}
    biases = {"q_bias": draw(H, 4, 128), "k_bias": draw(H, 4, 128)}
    return {"q": q, "k": k, "v": v, **decays, **biases, "angles": draw(B, T, H, 32)}


def _ssd_mimo(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    return ssd_mimo(q, k, v, Strengths(*rest[:3]), heads=Heads(*rest[3:]))[0]


def _taylor(draw: Draw, B: int, T: int) -> Inputs:
    return {"q": draw(B, T, H, 16), "k": draw(B, T, H, 16), "v": draw(B, T, H, K)}


def _wkv4(draw: Draw, B: int, T: int) -> Inputs:
    return {"k": draw(B, T, D), "v": draw(B, T, D), "decay": draw(D).exp(), "bonus": draw(D)}


def _wkv6(draw: Draw, B: int, T: int) -> Inputs:
    r, k, v = _heads(draw, B, T).values()
    return {"r": r, "k": k, "v": v, "log_decay": -(draw(B, T, H, K) - 2).exp(), "bonus": draw(H, K)}


def _wkv7(draw: Draw, B: int, T: int) -> Inputs:
    # As RWKV-7 makes them: log decays of at least -exp(-1/2), b is minus a times a rate in 0..1.
    r, k, v = _heads(draw, B, T).values()
    a = -F.normalize(draw(B, T, H, K), dim=-1)
    decay, rate = (draw(B, T, H, K).sigmoid() for _ in range(2))
    return {"r": r, "log_decay": -0.6 * decay, "k": k, "v": v, "a": a, "b": -a * rate}


CASES = {
    "attention": Launched(attention, _heads),
    "attention window": Launched(partial(attention, window=256), _heads),
    "channel_delta_rule": Launched(channel_delta_rule, _channel_delta, ("beta", "log_decay")),
    "delta_rule": Launched(delta_rule, _delta, ("beta", "log_decay")),
    "flash-attention-2": Launched(partial(sdpa, SDPBackend.FLASH_ATTENTION), _heads),
    "forgetting_attention": Launched(forgetting_attention, _forgetting, ("log_decay",)),
    "index_divergence": Launched(index_divergence, _indexed),
    "linear_cross_entropy": Launched(linear_cross_entropy, _cross_entropy),
    "long_convolution": Launched(long_convolution, _long_convolution, ("filter",)),
    "selected_attention": Launched(selected_attention, _selected),
    "selective_scan": Launched(selective_scan, _selective_scan, ("dt", "A")),
    "short_convolution": Launched(
        partial(short_convolution, activation="silu"), _short_convolution, ("weight", "bias")
    ),
    "ssd": Launched(partial(ssd, final=False), _ssd, ("log_decay",)),
    "ssd_mimo": Launched(_ssd_mimo, _mimo, ("log_decay", "now", "kept", "q_bias", "k_bias", "angles")),
    "taylor_attention": Launched(taylor_attention, _taylor),
    "top1_chunk approx": Launched(partial(top1_chunk, mode="approx"), _normalised),
    "top1_chunk exact": Launched(partial(top1_chunk, mode="exact"), _normalised),
    "top1_element": Launched(top1_element, _normalised),
    "wkv4": Launched(wkv4, _wkv4),
    "wkv6": Launched(wkv6, _wkv6),
    "wkv7": Launched(wkv7, _wkv7),
    "wkv7_bounded": Launched(wkv7_bounded, _wkv7),
}


class Clock(NamedTuple):
    """Milliseconds of a function: until a call returns, on an idle device, and of the device alone."""

    host: Callable[[Callable[[], object]], float]
    device: Callable[[Callable[[], object]], float]


def gpu_clock(repeats: int) -> Clock:
    """Return medians on the current GPU: of `CALLS` calls, and of `repeats` replays of a CUDA graph."""
    return Clock(_host, lambda run: milliseconds(captured(run), repeats))


def _host(run: Callable[[], object]) -> float:
    times = []
    for _ in range(WARM_UP + CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(times[WARM_UP:])


def most_rows() -> int:
    """Return how many rows `measure` adds; an op that cannot run has one."""
    return len(SHAPES) * len(CASES) * len(PASSES)


def measure(
    rows: list[Row],
    device: torch.device,
    clock: Clock,
    advance: Advance,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Add a row for each of `CASES`, shape and pass; those that wait longest for Python come first.

    `meets` says whether a call returns within `RATIO` times the work of the GPU or within `SHORT` milliseconds. What
    cannot run or be captured comes last.

    Args:
        rows: changed in place.
        device: where the inputs are.
        clock: what measures.
        advance: takes the rows that are done, `most_rows` in all, and what is measured.
        save: called after each row.
    """
    for B, T in SHAPES:
        for name, case in CASES.items():
            note, left = f"launch of {name}, {B} x {T}", len(PASSES)
            advance(0, note=note)
            for row in _attempt(case, B, T, device, clock):
                rows.append({"op": name, "batch": B, "length": T, **row})
                rows.sort(key=_excess, reverse=True)
                save()
                advance(1, note=note)
                left -= 1
            advance(left, note=note)


def _allowed(work: float) -> float:
    return max(RATIO * work, SHORT)


def _excess(row: Row) -> float:
    return row["host ms"] / _allowed(row["device ms"]) if "device ms" in row else -1.0


def _attempt(case: Launched, B: int, T: int, device: torch.device, clock: Clock) -> Iterator[Row]:
    """Yield the rows of a case, the last one says why it cannot run: the other ops are still of interest."""
    try:
        yield from _passes(case, B, T, device, clock)
    except Exception as error:
        yield {"cannot run": (str(error).strip() or type(error).__name__).splitlines()[0]}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _passes(case: Launched, B: int, T: int, device: torch.device, clock: Clock) -> Iterator[Row]:
    inputs = _inputs(case, B, T, device)
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]

    def forward() -> Tensor:
        out: Tensor | tuple[Tensor, ...] = case.op(*inputs)
        return out if isinstance(out, Tensor) else out[0]

    with recorded() as ran:
        upstream = torch.randn_like(forward())

    def inference() -> None:
        with torch.no_grad():
            forward()

    def training() -> None:
        # An indexer learns from attention's queries and keys, which do not learn from it.
        torch.autograd.grad(forward(), leaves, upstream, allow_unused=True)

    def in_one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            training()

    for name, run in zip(PASSES, (inference, training, in_one_thread), strict=True):
        yield {"pass": name, **_times(run, clock), **runs(ran)}


def _inputs(case: Launched, B: int, T: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    drawn = case.inputs(lambda *shape: torch.randn(shape, generator=generator, device=device), B, T)
    kept = {name for name, x in drawn.items() if name in case.wide or not x.is_floating_point()}
    return [x if name in kept else x.to(torch.bfloat16) for name, x in drawn.items()]


def _times(run: Callable[[], object], clock: Clock) -> Row:
    host = clock.host(run)
    try:
        work = clock.device(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return {"host ms": host, "no graph": str(error).splitlines()[0]}
    return {
        "host ms": host,
        "device ms": work,
        "ratio": host / work,
        "meets": "yes" if host <= _allowed(work) else "no",
    }

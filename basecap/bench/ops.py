"""Speed and memory of ops: Top-1 selection beside the attention of PyTorch, and what launching every op costs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from basecap.bench import launch, peers
from basecap.errors import ConfigError, nearest
from basecap.ops import choose, recorded
from basecap.ops.attention.flex_kernels import block_mask
from basecap.ops.top1_chunk import FAMILIES, top1_chunk, top1_chunk_cache, top1_chunk_fill, top1_chunk_step
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.ops.top1_chunk.operators import attend
from basecap.system.cuda_graph import captured, milliseconds
from basecap.system.environment import describe
from basecap.system.progress import progress

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Heads and head size of the two published model sizes.
SHAPES = ((12, 64), (16, 128))
CHUNK = 128
WINDOW = 256


def run(
    *,
    device: torch.device,
    length: int = 102_400,
    repeats: int = 10,
    peer: bool = False,
    only: Sequence[str] = (),
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time training and decoding of Top-1 chunk selection and its rivals, in bfloat16, batch 1 (decoding: 64).

    Times are medians in milliseconds, without compilation and warm-up: "graph" of replays of a CUDA graph, the device's
    alone, which ratios compare, "from Python" of the same calls with the wait for their launch. Queries and keys are
    random, normalised to root mean square 1 per head as in the architecture. For the table launch see
    `basecap.bench.launch.measure`.

    Args:
        device: a CUDA device.
        length: tokens of the training figures; decoding has half as many in its cache.
        repeats: runs timed.
        peer: whether to add the table peers, flash-linear-attention's mixture of block attention.
        only: tables to measure; all when empty.
        save: called after each table with all that is found so far.

    Returns:
        environment, setting, the tables as lists of rows, and `complete`, which is False when it was interrupted.

    Raises:
        ConfigError: a device without CUDA; an unknown table; peers without flash-linear-attention.
    """
    tables = _chosen(only, peer)
    if "peers" in tables:
        peers.require()
    if device.type != "cuda":
        raise ConfigError(
            f"bench ops times GPU kernels and needs a CUDA GPU, not {device.type}; without one `basecap check` "
            "compares every op with its reference, and `basecap bench models` times training steps."
        )
    setting = {"length": length, "repeats": repeats, "chunk": CHUNK, "window": WINDOW, "dtype": "bfloat16", "batch": 1}
    found: dict[str, Any] = {"environment": describe(device), "setting": setting, "complete": False}
    found |= {name: [] for name in tables}
    by_shape = {name: TABLES[name] for name in tables if name in TABLES}
    total = len(by_shape) * len(SHAPES) + ("launch" in tables)
    try:
        with progress("bench ops", total=total, unit="tables") as advance:
            if "launch" in tables:
                launch.measure(found["launch"], device, launch.gpu_clock(repeats), advance)
                save(found)
                advance(1)
            for heads, width in SHAPES:
                for name, measure in by_shape.items():
                    rows = measure(heads, width, length, repeats, device)
                    found[name] += [{"heads": heads, "head_dim": width, **row} for row in rows]
                    torch.cuda.empty_cache()
                    save(found)
                    advance(1, note=f"{name} {heads} x {width}")
        found["complete"] = True
    except KeyboardInterrupt:
        pass  # what was measured is worth keeping
    return found


def _chosen(only: Sequence[str], peer: bool) -> list[str]:
    """Return the names of the tables to measure, in their order; raises ConfigError for an unknown one."""
    names = ["launch", *TABLES]
    for name in only:
        if name not in names:
            raise ConfigError(f"unknown table {name!r}: {nearest(name, names)}")
    return [name for name in names if name in only or (name == "peers" and peer) or (not only and name != "peers")]


def _timed(what: str, run: Callable[[], object], repeats: int, times: int = 1) -> dict[str, float]:
    """Return the milliseconds of a call, as a CUDA graph of `times` calls and from Python."""
    return {
        f"{what} graph ms": milliseconds(captured(run, times), repeats) / times,
        f"{what} from Python ms": milliseconds(run, repeats),
    }


def _inputs(batch: int, length: int, heads: int, width: int, device: torch.device) -> list[Tensor]:
    """Return q, k, v and do [B, T, H, K]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, length, heads, width)
    q, k, v, do = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4))
    return [F.rms_norm(q, (width,)), F.rms_norm(k, (width,)), v, do]


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _window(length: int, device: torch.device) -> Attention:
    mask = block_mask(1, length, WINDOW, None, device)
    kernel = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernel(q, k, v, block_mask=mask).transpose(1, 2)

    return attention


def _contenders(length: int, device: torch.device) -> dict[str, Attention]:
    return {
        "flash-attention-2": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        f"flex window {WINDOW}": _window(length, device),
        "top1-chunk exact": partial(top1_chunk, chunk=CHUNK, mode="exact", backend="triton"),
        "top1-chunk approx": partial(top1_chunk, chunk=CHUNK, mode="approx", backend="triton"),
    }


def _step(attention: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
    torch.autograd.grad(attention(q, k, v), (q, k, v), do)


def _refusal(run: Callable[[], object]) -> str | None:
    """Return why a rival cannot run here, or None."""
    try:
        run()
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def _runs(ran: dict[str, str]) -> dict[str, str]:
    """Return the column that says which kernels of ours ran, and why no faster ones; none for rivals."""
    return {"runs": "; ".join(ran.values())} if ran else {}


def _compare(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Add to each row how many times faster it is than the rivals."""
    for rival in ("flash-attention-2", "cudnn"):
        base = next((row[key] for row in rows if row["op"] == rival and key in row), None)
        for row in rows:
            if base is not None and key in row:
                row[f"x {rival}"] = base / row[key]
    return rows


def _training(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    q, k, v, do = _inputs(1, length, heads, width, device)
    for x in (q, k, v):
        x.requires_grad_()
    rows: list[dict[str, Any]] = []
    for name, attention in _contenders(length, device).items():
        step = partial(_step, attention, q, k, v, do)
        with recorded() as ran:
            reason = _refusal(step)
        if reason is not None:
            rows.append({"op": name, "cannot run": reason})
            continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        # The output and three gradients are anyone's.
        extra = torch.cuda.max_memory_allocated() - before - 4 * q.numel() * q.element_size()
        with torch.no_grad():
            forward = _timed("forward", partial(attention, q, k, v), repeats)
        row = {"op": name, **forward, **_timed("forward+backward", step, repeats)}
        rows.append({**row, "extra bytes per token": extra / length, **_runs(ran)})
    return _compare(rows, "forward+backward graph ms")


def _skew(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time the attention passes, without the choice, under an even and under the worst choice."""
    q, k, v, do = _inputs(1, length, heads, width, device)
    with recorded() as ran:
        family = choose("top1_chunk", "triton", FAMILIES, q, CHUNK)
    grid, own = chunk_grid(q, CHUNK, None, None)
    q, k, v, do = (x[0].requires_grad_() for x in (q, k, v, do))
    generator = torch.Generator(device).manual_seed(1)
    even = torch.rand(length, heads, 1, device=device, generator=generator) * own[:, None, None]
    even = torch.where(own[:, None, None] > 0, even.to(torch.int32), -1)
    times = {}
    for name, choice in (("even", even), ("one chunk", even.clamp(max=0))):
        run = partial(attend, q, k, v, choice, [grid, own], CHUNK, width**-0.5, family)
        with torch.no_grad():
            forward = _timed("forward", run, repeats)

        def step(run: Callable[[], tuple[Tensor, ...]] = run) -> None:
            torch.autograd.grad(run()[0], (q, k, v), do)

        both = _timed("forward", step, repeats)
        backward = {key.replace("forward", "backward"): both[key] - forward[key] for key in both}
        times[name] = forward | backward
    return [
        {"choice": name, **row, **{f"{key} / even": row[key] / times["even"][key] for key in row}, **_runs(ran)}
        for name, row in times.items()
    ]


def _decode(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time one step of 64 sequences with half of `length` in the cache."""
    batch = 64
    length = length // (2 * CHUNK) * CHUNK - 1
    q, k, v, _ = _inputs(batch, 1, heads, width, device)
    cache = top1_chunk_cache(batch, length + 1, heads, width, chunk=CHUNK, dtype=q.dtype, device=device)
    for row in range(batch):
        part = {name: tensor[row : row + 1] for name, tensor in cache.items()}
        _, keys, values, _ = _inputs(1, length, heads, width, device)
        top1_chunk_fill(keys, values, part, chunk=CHUNK)
    q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q, cache["k"], cache["v"]))

    def full(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)

    runs: dict[str, Callable[[], object]] = {
        "flash-attention-2": partial(full, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(full, SDPBackend.CUDNN_ATTENTION),
    }
    for mode in ("exact", "approx"):
        runs[f"top1-chunk {mode}"] = partial(
            top1_chunk_step, q, k, v, cache, length, chunk=CHUNK, mode=mode, backend="triton"
        )
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, run in runs.items():
            with recorded() as ran:
                reason = _refusal(run)
            timed = {"cannot run": reason} if reason else _timed("step", run, repeats, 10)
            rows.append({"op": name, **timed, **_runs(ran)})
    return _compare(rows, "step graph ms")


def _crossover(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time training against the length, in powers of two up to `length`."""
    rows = []
    for tokens in (2**n for n in range(10, length.bit_length())):
        q, k, v, do = _inputs(1, tokens, heads, width, device)
        for x in (q, k, v):
            x.requires_grad_()
        row: dict[str, Any] = {"length": tokens}
        for name, attention in _contenders(tokens, device).items():
            if "flex" not in name:
                times = max(1, min(10, 65_536 // tokens))
                row |= _timed(name, partial(_step, attention, q, k, v, do), repeats, times)
        rows.append(row)
    return rows


def _peers(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time training of mixture of block attention with one remote chunk, which approx mode is too.

    Both are launched from Python: the peer reads sizes back from the device, which a CUDA graph cannot hold.
    """
    q, k, v, do = _inputs(1, length, heads, width, device)
    for x in (q, k, v):
        x.requires_grad_()
    contenders: dict[str, Attention] = {
        "top1-chunk approx": partial(top1_chunk, chunk=CHUNK, mode="approx", backend="triton"),
        "flash-linear-attention moba": peers.moba(length, CHUNK, device),
    }
    rows: list[dict[str, Any]] = []
    for name, attention in contenders.items():
        step = partial(_step, attention, q, k, v, do)
        with recorded() as ran:
            reason = _refusal(step)
        timed: dict[str, Any] = (
            {"cannot run": reason} if reason else {"forward+backward from Python ms": milliseconds(step, repeats)}
        )
        rows.append({"op": name, **timed, **_runs(ran)})
    return rows


#: Tables with rows for each of `SHAPES`.
TABLES = {"training": _training, "skew": _skew, "decode": _decode, "crossover": _crossover, "peers": _peers}

"""Speed and memory of ops: Top-1 selection beside the attention of PyTorch, and what launching every op costs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from basecap.bench import launch, op_peers
from basecap.bench.attentions import CHUNK, Attention, Row, attention_inputs, runs, sdpa, timed
from basecap.errors import ConfigError, nearest
from basecap.ops import choose, recorded
from basecap.ops.attention.flex_kernels import block_mask
from basecap.ops.top1_chunk import FAMILIES, top1_chunk, top1_chunk_cache, top1_chunk_fill, top1_chunk_step
from basecap.ops.top1_chunk.grid import chunk_grid
from basecap.ops.top1_chunk.operators import attend
from basecap.system.environment import describe
from basecap.system.progress import progress

#: Heads and head size of the two published model sizes.
SHAPES = ((12, 64), (16, 128))
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
        peer: whether to add the table peers, kernels of other libraries, see `basecap.bench.op_peers`.
        only: tables to measure; all but peers when empty.
        save: called with all that is found so far: after each row of launch, and after each other table of one shape.

    Returns:
        environment, setting, the tables as lists of rows, `absent` (what peers need that is not installed, by name) and
        `complete`, which is False when it was interrupted.

    Raises:
        ConfigError: a device without CUDA, or an unknown table.
    """
    tables = _chosen(only, peer)
    if device.type != "cuda":
        raise ConfigError(
            f"bench ops times GPU kernels and needs a CUDA GPU, not {device.type}; without one `basecap check` "
            "compares every op with its reference, and `basecap bench models` times training steps."
        )
    setting = {"length": length, "repeats": repeats, "chunk": CHUNK, "window": WINDOW, "dtype": "bfloat16", "batch": 1}
    found: dict[str, Any] = {"environment": describe(device), "setting": setting, "complete": False, "absent": {}}
    found |= {name: [] for name in tables}
    try:
        _measure(found, tables, length, repeats, device, save)
        found["complete"] = True
    except KeyboardInterrupt:
        pass  # what was measured is worth keeping
    return found


def _measure(
    found: dict[str, Any],
    tables: Sequence[str],
    length: int,
    repeats: int,
    device: torch.device,
    save: Callable[[dict[str, Any]], None],
) -> None:
    by_shape = {name: TABLES[name] for name in tables if name in TABLES}
    others = OTHER_PEERS if "peers" in tables else ()
    rows = launch.most_rows() if "launch" in tables else 0
    total = len(by_shape) * len(SHAPES) + len(others) + rows
    with progress("bench ops", total=total, unit="measurements") as advance:
        if "launch" in tables:
            launch.measure(found["launch"], device, launch.gpu_clock(repeats), advance, partial(save, found))
        for heads, width in SHAPES:
            for name, measure in by_shape.items():
                note = f"{name} {heads} x {width}"
                advance(0, note=note)
                _add(found, name, measure(heads, width, length, repeats, device), heads, width)
                save(found)
                advance(1, note=note)
        for build in others:
            advance(0, note="peers")
            compared = build(length, device)
            heads, width = compared.inputs[0].shape[2:]
            _add(found, "peers", op_peers.measure(compared, repeats, device), heads, width)
            save(found)
            advance(1, note="peers")


def _add(found: dict[str, Any], table: str, rows: list[Row], heads: int, width: int) -> None:
    """Add rows to a table, and those of peers that are not installed to `absent`; free what they took."""
    for row in rows:
        if "absent" in row:
            found["absent"][row["op"]] = row["absent"]
        else:
            found[table].append({"heads": heads, "head_dim": width, **row})
    torch.cuda.empty_cache()


def _chosen(only: Sequence[str], peer: bool) -> list[str]:
    """Return the names of the tables to measure, in their order; raises ConfigError for an unknown one."""
    names = ["launch", *TABLES]
    for name in only:
        if name not in names:
            raise ConfigError(f"unknown table {name!r}: {nearest(name, names)}")
    return [name for name in names if name in only or (name == "peers" and peer) or (not only and name != "peers")]


def _window(length: int, device: torch.device) -> Attention:
    mask = block_mask(1, length, WINDOW, None, device)
    kernel = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernel(q, k, v, block_mask=mask).transpose(1, 2)

    return attention


def _contenders(length: int, device: torch.device) -> dict[str, Attention]:
    return {
        "flash-attention-2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
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


def _compare(rows: list[Row], key: str) -> list[Row]:
    """Add to each row how many times faster it is than the rivals."""
    for rival in ("flash-attention-2", "cudnn"):
        base = next((row[key] for row in rows if row["op"] == rival and key in row), None)
        for row in rows:
            if base is not None and key in row:
                row[f"x {rival}"] = base / row[key]
    return rows


def _training(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[Row]:
    q, k, v, do = attention_inputs(1, length, heads, width, device)
    for x in (q, k, v):
        x.requires_grad_()
    rows: list[Row] = []
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
            forward = timed("forward", partial(attention, q, k, v), repeats)
        row = {"op": name, **forward, **timed("forward+backward", step, repeats)}
        rows.append({**row, "extra bytes per token": extra / length, **runs(ran)})
    return _compare(rows, "forward+backward graph ms")


def _skew(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[Row]:
    """Time the attention passes, without the choice, under an even and under the worst choice."""
    q, k, v, do = attention_inputs(1, length, heads, width, device)
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
            forward = timed("forward", run, repeats)

        def step(run: Callable[[], tuple[Tensor, ...]] = run) -> None:
            torch.autograd.grad(run()[0], (q, k, v), do)

        both = timed("forward", step, repeats)
        backward = {key.replace("forward", "backward"): both[key] - forward[key] for key in both}
        times[name] = forward | backward
    return [
        {"choice": name, **row, **{f"{key} / even": row[key] / times["even"][key] for key in row}, **runs(ran)}
        for name, row in times.items()
    ]


def _decode(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[Row]:
    """Time one step of 64 sequences with half of `length` in the cache."""
    batch = 64
    length = length // (2 * CHUNK) * CHUNK - 1
    q, k, v, _ = attention_inputs(batch, 1, heads, width, device)
    cache = top1_chunk_cache(batch, length + 1, heads, width, chunk=CHUNK, dtype=q.dtype, device=device)
    for row in range(batch):
        part = {name: tensor[row : row + 1] for name, tensor in cache.items()}
        _, keys, values, _ = attention_inputs(1, length, heads, width, device)
        top1_chunk_fill(keys, values, part, chunk=CHUNK)
    q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q, cache["k"], cache["v"]))

    def full(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)

    steps: dict[str, Callable[[], object]] = {
        "flash-attention-2": partial(full, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(full, SDPBackend.CUDNN_ATTENTION),
    }
    for mode in ("exact", "approx"):
        steps[f"top1-chunk {mode}"] = partial(
            top1_chunk_step, q, k, v, cache, length, chunk=CHUNK, mode=mode, backend="triton"
        )
    rows: list[Row] = []
    with torch.no_grad():
        for name, run in steps.items():
            with recorded() as ran:
                reason = _refusal(run)
            took: Row = {"cannot run": reason} if reason else timed("step", run, repeats, 10)
            rows.append({"op": name, **took, **runs(ran)})
    return _compare(rows, "step graph ms")


def crossover_lengths(length: int) -> list[int]:
    """Return the lengths of the table crossover: powers of two up to `length`, and where launches begin to hide, 6,144.

    >>> crossover_lengths(8192)
    [1024, 2048, 4096, 6144, 8192]
    """
    return sorted({*(2**n for n in range(10, length.bit_length())), *({6144} if length >= 6144 else ())})


def _crossover(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[Row]:
    """Time training against the length."""
    rows = []
    for tokens in crossover_lengths(length):
        q, k, v, do = attention_inputs(1, tokens, heads, width, device)
        for x in (q, k, v):
            x.requires_grad_()
        row: dict[str, Any] = {"length": tokens}
        for name, attention in _contenders(tokens, device).items():
            if "flex" not in name:
                times = max(1, min(10, 65_536 // tokens))
                row |= timed(name, partial(_step, attention, q, k, v, do), repeats, times)
        rows.append(row)
    return rows


def _peers(heads: int, width: int, length: int, repeats: int, device: torch.device) -> list[Row]:
    return op_peers.measure(op_peers.attention_peers(heads, width, length, device), repeats, device)


#: Tables with rows for each of `SHAPES`.
TABLES = {"training": _training, "skew": _skew, "decode": _decode, "crossover": _crossover, "peers": _peers}
#: The rows of the table peers that have shapes of their own.
OTHER_PEERS = (op_peers.sparse_peers, op_peers.delta_peers, op_peers.kda_peers)

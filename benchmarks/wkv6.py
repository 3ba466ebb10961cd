"""Time the recurrence of RWKV-6 in each of its kernels beside flash-linear-attention's, with the errors of all.

Run `python -m benchmarks.wkv6 [FILE]` on a CUDA GPU with the package fla-core; results are also written to FILE as
JSON after each row. flash-linear-attention tunes its kernels at the first shape, which takes minutes, and keeps what it
has found for the next call; the times of that shape are written after it. `--shapes`, `--decays` and `--kernels` choose
parts, and none begins after `--seconds`.

Errors are relative to the definition in float64 and given in multiples of those of plain PyTorch in the same dtype: the
kernels of basecap may have at most 2, in the mean and at the worst place. Times are medians in milliseconds over rounds
in which the kernels take turns, as a CUDA graph (the device's alone) and launched from Python.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basecap.ops.wkv6 import eager, reference, triton_chunks, triton_tokens
from basecap.system.cuda_graph import captured, milliseconds
from basecap.system.environment import describe
from basecap.testing.tolerance import largest_error, relative_error

Op = Callable[..., tuple[Tensor, Tensor]]

#: Rows, tokens, heads; keys and values have 64 channels.
SHAPES = ((16, 2048, 12), (32, 512, 12), (64, 256, 12), (4, 8192, 12), (1, 32_768, 12), (8, 2048, 32))
WIDTH = 64
#: Rows, tokens and heads of the comparison with the definition; not whole chunks.
COMPARED = (2, 500, 4)
DTYPE = torch.bfloat16
ROUNDS, REPEATS = 3, 10
#: What is compared: results, then gradients.
NAMES = ("o", "state", "dr", "dk", "dv", "dlog_decay", "dbonus")


def fla(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: None, segments: None) -> Any:
    """Return what `wkv6` returns, by flash-linear-attention."""
    from fla.ops.rwkv6 import chunk_rwkv6

    return chunk_rwkv6(r, k, v, log_decay, bonus, scale=1.0, initial_state=state, output_final_state=True)


KERNELS: dict[str, Op] = {
    "triton_chunks": triton_chunks.wkv6,
    "triton_tokens": triton_tokens.wkv6,
    "fla chunk_rwkv6": fla,
}


def mild(x: Tensor) -> Tensor:
    """Return log decays as those of a trained model: half of them weaker than -0.14, a few below -1."""
    return -(x - 2).exp()


def strong(x: Tensor) -> Tensor:
    """Return log decays of which a fifth leaves less than a thousandth per token."""
    return -(2 * x).exp()


def forgetting(x: Tensor) -> Tensor:
    """Return mild log decays, except for every 50th token, which leaves nothing of the state."""
    decays = mild(x)
    decays[:, ::50] = -1e4
    return decays


DECAYS: dict[str, Callable[[Tensor], Tensor]] = {"mild": mild, "strong": strong, "forgetting": forgetting}


def inputs(shape: tuple[int, int, int], decays: Callable[[Tensor], Tensor], device: torch.device) -> list[Tensor]:
    """Return r, k, v [B, T, H, 64] in bfloat16, float32 log decays, as the mixer has them, and the bonus [H, 64]."""
    generator = torch.Generator(device).manual_seed(0)
    r, k, v, x = (torch.randn(*shape, WIDTH, device=device, generator=generator) for _ in range(4))
    bonus = torch.randn(shape[2], WIDTH, device=device, generator=generator)
    return [*(y.to(DTYPE) for y in (r, k, v)), decays(x), bonus]


def results(op: Op, given: list[Tensor]) -> list[Tensor]:
    """Return output and state, and the gradients of a random weighting of them."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    outputs = op(*leaves, None, None)
    generator = torch.Generator(given[0].device).manual_seed(1)
    weights = [torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]


def errors(decays: str, kernels: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row per kernel and tensor: relative error, and errors in multiples of plain PyTorch's."""
    given = inputs(COMPARED, DECAYS[decays], device)
    truth = results(reference.wkv6, [x.double() for x in given])
    plain = results(eager.wkv6, given)
    for kernel in kernels:
        for name, x, y, z in zip(NAMES, results(KERNELS[kernel], given), plain, truth, strict=True):
            row: dict[str, Any] = {"decays": decays, "kernel": kernel, "tensor": name, "error": relative_error(x, z)}
            row["of plain PyTorch's"] = relative_error(x, z) / relative_error(y, z)
            yield row | {"at worst": largest_error(x, z) / largest_error(y, z)}


def times(shape: tuple[int, int, int], kernels: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """Return a row per kernel with its times and the peak of its memory beyond the inputs."""
    leaves = [x.requires_grad_() for x in inputs(shape, mild, device)]
    gradient = torch.randn_like(leaves[2])
    measured: dict[str, dict[str, list[float]]] = {kernel: {} for kernel in kernels}
    memory = {}
    runs: dict[str, dict[str, Callable[[], object]]] = {}
    for kernel in kernels:
        op = KERNELS[kernel]

        def forward(op: Op = op) -> object:
            with torch.no_grad():
                return op(*leaves, None, None)

        def both(op: Op = op) -> object:
            return torch.autograd.grad(op(*leaves, None, None)[0], leaves, gradient)

        both()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        memory[kernel] = (torch.cuda.max_memory_allocated() - before) / 2**20
        runs[kernel] = {
            "forward ms": captured(forward),
            "forward+backward ms": captured(both),
            "forward+backward from Python ms": both,
        }
    for _ in range(ROUNDS):
        for kernel, ways in runs.items():
            for way, run in ways.items():
                measured[kernel].setdefault(way, []).append(milliseconds(run, REPEATS))
    return [
        {"shape": "x".join(map(str, shape)), "kernel": kernel, "MiB": memory[kernel]}
        | {way: statistics.median(found) for way, found in ways.items()}
        for kernel, ways in measured.items()
    ]


def shape_of(text: str) -> tuple[int, int, int]:
    """Return the shape written as in the table, such as 16x2048x12."""
    rows, tokens, heads = map(int, text.split("x"))
    return rows, tokens, heads


def main() -> int:
    """Print the tables and write them to the file given; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=SHAPES, help="such as 16x2048x12 (default: all)")
    parser.add_argument("--decays", choices=DECAYS, nargs="*", default=[*DECAYS], help="default: all")
    parser.add_argument("--kernels", choices=KERNELS, nargs="+", default=[*KERNELS], help="default: all")
    parser.add_argument("--seconds", type=float, default=380, help="after which no part begins (default: 380)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this times GPU kernels and needs a CUDA GPU")
        return 2
    began, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    found: dict[str, Any] = {"environment": describe(device), "errors": [], "times": [], "not begun": 0}
    tuned = [name for name in options.kernels if KERNELS[name] is fla]  # at the first shape that it is called with
    own = [name for name in options.kernels if name not in tuned]
    parts: list[tuple[str, Callable[[], Iterable[dict[str, Any]]]]]
    parts = [("errors", partial(errors, name, own, device)) for name in options.decays if own]
    parts += [("times", partial(times, shape, options.kernels, device)) for shape in options.shapes]
    parts += [("errors", partial(errors, name, tuned, device)) for name in options.decays if tuned]
    last = ""
    for table, measure in parts:
        if time.monotonic() - began > options.seconds:
            found["not begun"] += 1
        else:
            for row in measure():
                if table != last:
                    print("\n" + ", ".join(row))
                last = table
                found[table].append(row)
                print(*(f"{x:10.3g}" if isinstance(x, float) else f"{x:16}" for x in row.values()), flush=True)
                save(options.file, found)
    save(options.file, found)
    print(f"{time.monotonic() - began:.0f} s, parts not begun: {found['not begun']}")
    return 0


def save(file: Path | None, found: dict[str, Any]) -> None:
    """Write what was found so far."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

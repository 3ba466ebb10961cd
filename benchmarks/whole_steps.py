"""Time whole training steps of 110M models at a small and a large batch, launched by Python and as CUDA graphs.

Run `python -m benchmarks.whole_steps OUT.json` on a machine with a GPU. A step is that of the training loop, with batch
from the host, clipping, AdamW and the loss read back, at 2,048 tokens and 4 and 32 sequences; times are medians of
steps that follow each other, after those that compile, tune and capture. `per_token` is a step's time for each token at
the small batch, relative to the large one: 1 where small steps wait for nothing. When the minutes are over the script
ends between two models; the same command goes on with those that OUT.json lacks. By default it measures the
architectures of the table in results/models/README.md; `--only` names others.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from basecap.data.workload import Batch
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.system.environment import choose_device, describe
from basecap.train.config import TrainConfig
from basecap.train.copies import lay_out
from basecap.train.distributed import Processes
from basecap.train.graphs import graphed
from basecap.train.optim import build_optimiser, set_learning_rate
from basecap.train.placement import DevicePlacement
from basecap.train.step import LaunchedStep, TrainingStep

#: The architectures of the table, first those on which the goal was set.
TABLE = (
    "transformer++",
    "mamba-2",
    "rwkv-7",
    "top1-chunk-exact",
    "deltanet",
    "gated-deltanet",
    "mamba-1",
    "top1-chunk-approx",
    "transformer++ window",
    "transformer",
    "pythia",
    "based",
    "hyena",
    "rwkv-4",
    "rwkv-5",
    "rwkv-6",
    "top1-element",
)
#: Steps before those that are timed, of which there are so many for each batch.
WARM, STEPS = 6, {4: 30, 32: 10}
#: Sequences, width, vocabulary and tokens; on a CPU, where nothing is captured, sizes of a second.
SIZES = {"cuda": (768, 32_000, 2_048), "cpu": (64, 256, 64)}
RATE = 1e-4

Row = dict[str, Any]


def seconds(step: TrainingStep, batch: Batch, count: int, device: torch.device, optimiser: Any) -> float:
    """Return the median time of `count` steps, each with its loss read back as in the training loop."""
    share = torch.ones((), device=device)
    times = []
    for _ in range(WARM + count):
        since = time.perf_counter()
        set_learning_rate(optimiser, RATE)
        loss, norm = step.gradients([batch.to(device)], [share])
        torch.cat([loss, norm[None]]).tolist()
        step.update()
        times.append(time.perf_counter() - since)
    return statistics.median(times[WARM:])


def measure(name: str, rows: int, device: torch.device) -> list[Row]:
    """Return a row for steps that Python launches and, on a GPU, one for CUDA graphs."""
    hidden, vocab, length = SIZES[device.type]
    config = TrainConfig(tokens=rows * length, batch=rows, cuda_graphs="auto")
    placement = DevicePlacement.choose(device, Processes(), "auto")
    model = LanguageModel(model_config(name, hidden=hidden, vocab=vocab, max_length=length)).initialise(0).to(device)
    layout, optimiser = lay_out(model, config, Processes()), build_optimiser(model, model.recipe(), config)
    tokens = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    launched = LaunchedStep(model, optimiser, config, layout, placement)
    found: list[Row] = []
    for graphs in (False, True):
        step = graphed(launched, config, placement) if graphs else None
        if graphs and step is None:
            break
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        taken = seconds(step or launched, batch, STEPS[rows], device, optimiser)
        found.append(
            {
                "architecture": name,
                "batch": rows,
                "length": length,
                "parameters": model.parameters_count(),
                "cuda_graphs": step.record if step else None,
                "tokens_per_s": rows * length / taken,
                "ms_per_step": 1e3 * taken,
                "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
            }
        )
    return found


def attempt(name: str, rows: int, device: torch.device) -> list[Row]:
    """Return the rows of a model, or one that says why it cannot run; free its memory."""
    try:
        return measure(name, rows, device)
    except RuntimeError as error:  # the others are worth measuring
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [{"architecture": name, "batch": rows, "note": f"cannot run: {words[:200]}"}]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return for each architecture the times for a token at the small batch, relative to the faster at the large."""
    small, large = min(STEPS), max(STEPS)
    found = []
    for name in dict.fromkeys(row["architecture"] for row in rows):
        own = [row for row in rows if row["architecture"] == name and "ms_per_step" in row]
        best = max((row["tokens_per_s"] for row in own if row["batch"] == large), default=None)
        times = {
            "graphs" if row["cuda_graphs"] in ("step", "gradients") else "launched": best / row["tokens_per_s"]
            for row in own
            if best is not None and row["batch"] == small
        }
        found.append({"architecture": name, "per_token": times})
    return found


def main() -> int:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", help="this architecture alone; repeatable")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of time (default: 9)")
    given = parser.parse_args()
    began, longest, device = time.monotonic(), 0.0, choose_device(None)
    rows: list[Row] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    have = {(row["architecture"], row["batch"]) for row in rows}
    left = [(name, batch) for name in given.only or TABLE for batch in STEPS if (name, batch) not in have]
    while left and time.monotonic() - began + longest < 60 * given.minutes:
        since = time.monotonic()
        rows += attempt(*left.pop(0), device)
        longest = max(longest, time.monotonic() - since)
        found = {"environment": describe(device), "rows": rows, "per_token": compare(rows), "complete": not left}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    print("| architecture | launched | as CUDA graphs |\n| --- | --- | --- |")
    for row in compare(rows):
        times = [row["per_token"].get(key) for key in ("launched", "graphs")]
        print(f"| {row['architecture']} | " + " | ".join("–" if x is None else f"{x:.2f}" for x in times) + " |")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())

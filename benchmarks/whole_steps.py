"""Time whole training steps of 110M models at a small and a large batch, launched by Python and as CUDA graphs.

Run `python -m benchmarks.whole_steps OUT.json` on a machine with a GPU. A step is that of the training loop, compiled,
with batch from the host, clipping, AdamW and the loss read back, at 2,048 tokens and 4 and 32 sequences; times are
medians of steps that follow each other, after those that compile, tune and capture. `per_token` is a step's time for
each token at the small batch, relative to the large one: 1 where small steps wait for nothing.

With `--deterministic` it measures CUDA graphs without and with `train.deterministic`; `deterministic` is a step's time
with it, relative to one without. cuBLAS has the fixed buffers in both, because a process chooses them once; on a Hopper
GPU they are as large as PyTorch's own.

When the minutes are over the script ends between two rows; the same command goes on with those that OUT.json lacks.
`seconds` of a row is what it took in all, compiling included. By default the script measures the architectures of the
table in results/models/README.md; `--only` names others.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from basecap.data.workload import Batch
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import recorded
from basecap.system.environment import choose_device, describe
from basecap.train.config import TrainConfig
from basecap.train.copies import lay_out
from basecap.train.deterministic import deterministic, prepare, settings
from basecap.train.distributed import Processes
from basecap.train.graphs import graphed
from basecap.train.optim import build_optimiser, set_learning_rate
from basecap.train.placement import DevicePlacement, start_compilers
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


class Job(NamedTuple):
    """A row to measure: an architecture, the sequences of a step, and how it is taken."""

    name: str
    batch: int
    graphs: bool
    deterministic: bool

    def config(self, length: int) -> TrainConfig:
        """Return the options of its steps."""
        graphs = "auto" if self.graphs else False
        return TrainConfig(
            tokens=self.batch * length, batch=self.batch, cuda_graphs=graphs, deterministic=self.deterministic
        )


def jobs(names: Sequence[str], device: torch.device, *, repeating: bool) -> list[Job]:
    """Return what is measured: launched steps and CUDA graphs, or if `repeating` graphs without and with the option.

    Graphs are left out on a CPU.
    """
    ways = [(True, False), (True, True)] if repeating else [(False, False), (True, False)]
    ways = list(dict.fromkeys((graphs and device.type == "cuda", option) for graphs, option in ways))
    return [Job(name, batch, *way) for name in names for batch in STEPS for way in ways]


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


def measure(job: Job, device: torch.device) -> Row:
    """Return the time of a step, what it takes of the memory and what the ops run."""
    hidden, vocab, length = SIZES[device.type]
    config = job.config(length)
    placement = DevicePlacement.choose(device, Processes(), "auto")
    model = LanguageModel(model_config(job.name, hidden=hidden, vocab=vocab, max_length=length)).initialise(0)
    layout = lay_out(model.to(device), config, Processes())
    optimiser = build_optimiser(model, model.recipe(), config)
    tokens = torch.randint(vocab, (job.batch, length + 1), generator=torch.Generator().manual_seed(0))
    launched = LaunchedStep(model, optimiser, config, layout, placement)
    graphs = graphed(launched, config, placement)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = seconds(graphs or launched, Batch(tokens[:, :-1], tokens[:, 1:]), STEPS[job.batch], device, optimiser)
    return {
        "length": length,
        "parameters": model.parameters_count(),
        "cuda_graphs": graphs.record if graphs else None,
        "settings": settings(config, device),
        "tokens_per_s": job.batch * length / taken,
        "ms_per_step": 1e3 * taken,
        "memory_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
    }


def attempt(job: Job, device: torch.device) -> Row:
    """Return the row of a job, or one that says why it cannot run; free its memory."""
    began = time.perf_counter()
    with recorded() as ops:
        try:
            with deterministic(job.config(1), device):
                found = measure(job, device)
        except RuntimeError as error:  # the others are worth measuring
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            found = {"note": f"cannot run: {words[:200]}"}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    asked = {"architecture": job.name, "batch": job.batch, "graphs": job.graphs, "deterministic": job.deterministic}
    return asked | found | {"ops": dict(sorted(ops.items())), "seconds": round(time.perf_counter() - began, 1)}


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return for each architecture what launching costs (`per_token`) and what the same bits twice cost, by batch.

    `per_token` is the time for a token at the small batch, relative to the faster way at the large one.
    """
    small, large = min(STEPS), max(STEPS)
    found = []
    for name in dict.fromkeys(row["architecture"] for row in rows):
        own = [row for row in rows if row["architecture"] == name and "ms_per_step" in row]
        plain = [row for row in own if not row["deterministic"]]
        best = max((row["tokens_per_s"] for row in plain if row["batch"] == large), default=None)
        per_token = {
            "graphs" if row["cuda_graphs"] in ("step", "gradients") else "launched": best / row["tokens_per_s"]
            for row in plain
            if best is not None and row["batch"] == small
        }
        cost = {
            row["batch"]: row["ms_per_step"] / other["ms_per_step"]
            for row in own
            for other in plain
            if row["deterministic"] and (row["batch"], row["graphs"]) == (other["batch"], other["graphs"])
        }
        found.append({"architecture": name, "per_token": per_token, "deterministic": cost})
    return found


def table(rows: Sequence[Row]) -> str:
    """Return what is compared, in Markdown."""
    columns = {"launched": ("per_token", "launched"), "as CUDA graphs": ("per_token", "graphs")}
    columns |= {f"deterministic, batch {batch}": ("deterministic", batch) for batch in STEPS}
    lines = [["architecture", *columns], ["---"] * (1 + len(columns))]
    for row in compare(rows):
        numbers = [row[part].get(key) for part, key in columns.values()]
        lines.append([row["architecture"], *("–" if x is None else f"{x:.2f}" for x in numbers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", help="this architecture alone; repeatable")
    parser.add_argument("--deterministic", action="store_true", help="measure what train.deterministic costs")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of time (default: 9)")
    given = parser.parse_args()
    began, longest, device = time.monotonic(), 0.0, choose_device(None)
    rows: list[Row] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    have = {Job(*(row[key] for key in ("architecture", "batch", "graphs", "deterministic"))) for row in rows}
    left = [job for job in jobs(given.only or TABLE, device, repeating=given.deterministic) if job not in have]
    prepare(device, [job.config(1) for job in left])
    start_compilers(device, TrainConfig(tokens=1))
    while left and time.monotonic() - began + longest < 60 * given.minutes:
        since = time.monotonic()
        rows.append(attempt(left.pop(0), device))
        longest = max(longest, time.monotonic() - since)
        found = {"environment": describe(device), "rows": rows, "compared": compare(rows), "complete": not left}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Time training steps of one model on 1, 2 and 4 GPUs: tokens a second, memory, share of the GPU's arithmetic.

Run `python -m benchmarks.cards OUT.json --cards 1 2 4` on a machine with that many GPUs. For each number of cards it
starts `torchrun`, in which all processes train random tokens, with the same rows for each card. Steps are timed from
the fifth on. The peak of an H100 or H200 is 989e12 operations a second in bf16 without sparsity (NVIDIA's data sheet);
for other GPUs `mfu` is empty. `linear` is the rate divided by that of one card times the cards.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.system.environment import choose_device, describe
from basecap.train.config import TrainConfig
from basecap.train.copies import lay_out
from basecap.train.distributed import Processes, processes
from basecap.train.optim import build_optimiser, clip_gradients
from basecap.train.placement import DevicePlacement

LENGTH, VOCAB, WARM, STEPS = 2048, 32_000, 4, 12
PEAKS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}


@dataclass(frozen=True)
class Case:
    """A model and how it trains; `rows` sequences for each card, in forward passes of `micro` rows."""

    size: str
    hidden: int
    layers: int
    rows: int
    micro: int
    parallel: str
    checkpointing: bool | str = False


CASES = (
    Case("110M", 768, 12, 32, 32, "ddp"),
    Case("110M", 768, 12, 32, 32, "fsdp"),
    Case("1.3B", 2048, 24, 16, 8, "ddp"),
    Case("1.3B", 2048, 24, 16, 8, "fsdp"),
    Case("1.3B", 2048, 24, 32, 32, "fsdp", True),
)
#: One that takes seconds on a CPU, to try this script.
SMALL = (Case("tiny", 64, 2, 2, 1, "ddp"), Case("tiny", 64, 2, 2, 1, "fsdp", "selective"))


def measure(case: Case, architecture: str, device: torch.device, group: Processes) -> dict[str, Any]:
    """Return one row of the table; all processes call this together."""
    length, vocab = (LENGTH, VOCAB) if device.type == "cuda" else (64, 256)
    tokens = case.rows * length
    options = {"micro_batch": case.micro, "parallel": case.parallel, "checkpointing": case.checkpointing}
    config = TrainConfig(tokens=tokens * group.world, batch=case.rows * group.world, **options)
    placement = DevicePlacement.choose(device, group, "auto")
    shape = {"hidden": case.hidden, "vocab": vocab, "layers": case.layers, "max_length": length}
    model = LanguageModel(model_config(architecture, **shape), checkpointing=case.checkpointing).initialise(0)
    flops, parameters = model.training_flops(length) / length, model.parameters_count()
    layout = lay_out(model.to(device), config, group)
    optimiser = build_optimiser(model, model.recipe(), config)
    generator = torch.Generator(device).manual_seed(group.rank)
    parts = case.rows // case.micro
    since = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(WARM + STEPS):
        if step == WARM:
            wait(device)
            since = time.perf_counter()
        optimiser.zero_grad()
        for part in range(parts):
            rows = torch.randint(0, vocab, (case.micro, length + 1), generator=generator, device=device)
            with layout.without_sync(part + 1 == parts):
                with placement.autocast():
                    loss = layout.module(rows[:, :-1], rows[:, 1:]) / parts
                loss.backward()
        layout.total(clip_gradients(model, config))
        optimiser.step()
    wait(device)
    rate = STEPS * tokens / (time.perf_counter() - since)
    peak = (
        next((found for name, found in PEAKS.items() if torch.cuda.get_device_name(device).startswith(name)), None)
        if device.type == "cuda"
        else None
    )
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return asdict(case) | {
        "architecture": architecture,
        "parameters": parameters,
        "cards": group.world,
        "tokens_per_s": rate * group.world,
        "tokens_per_s_and_card": rate,
        "memory_gib": memory,
        "mfu": None if peak is None else rate * flops / peak,
    }


def wait(device: torch.device) -> None:
    """Wait until a device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work(arguments: argparse.Namespace) -> None:
    """Measure all cases in this process and those beside it; the leading one writes them."""
    device, rows = choose_device("cpu" if arguments.small else None), []
    if device.type == "cpu":
        torch.set_num_threads(1)
    with processes(device) as group:
        for case in SMALL if arguments.small else CASES:
            for architecture in arguments.architectures:
                try:
                    rows.append(measure(case, architecture, device, group))
                except torch.OutOfMemoryError:
                    rows.append(
                        asdict(case) | {"architecture": architecture, "cards": group.world, "memory_gib": "full"}
                    )
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if group.is_leader:
                    print(rows[-1], file=sys.stderr, flush=True)
        if group.is_leader:
            arguments.out.write_text(json.dumps({"machine": describe(device), "rows": rows}))


def main() -> None:
    """Start `torchrun` for each number of cards, and join what they wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--architectures", nargs="+", default=["transformer++"])
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    found: dict[str, Any] = {"rows": []}
    for cards in arguments.cards:
        part = arguments.out.with_suffix(f".{cards}.json")
        own = ["-m", "benchmarks.cards", str(part), "--worker", "--architectures", *arguments.architectures]
        own += ["--small"] if arguments.small else []
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards}"]
        subprocess.run([*launcher, *own], check=True)
        held = json.loads(part.read_text())
        found = {"machine": held["machine"], "rows": [*found["rows"], *held["rows"]]}
        part.unlink()
    alone = {key(row): row["tokens_per_s"] for row in found["rows"] if row["cards"] == 1 and "tokens_per_s" in row}
    for row in found["rows"]:
        if "tokens_per_s" in row and key(row) in alone:
            row["linear"] = row["tokens_per_s"] / alone[key(row)] / row["cards"]
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row has in common with that of one card."""
    return row["size"], row["architecture"], row["parallel"], row["checkpointing"]


if __name__ == "__main__":
    main()

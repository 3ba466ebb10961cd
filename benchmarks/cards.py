"""Time training steps of one model on 1, 2 and 4 GPUs: tokens a second, memory, share of the GPU's arithmetic.

Run `python -m benchmarks.cards OUT.json --cards 1 2 4` on a machine with that many GPUs. Each number of cards, model
and architecture is an entry, for which `torchrun` starts a process a card; all train on random tokens, with as many
rows on each card. An entry's rate is that of its median step, beginning with the fifth; the first ones compile and
tune. OUT.json is written after each entry, and entries that `--seconds` leaves no time for say so. `--only` chooses
models, such as `--only figure-7`: the six architectures of bc-figure-7 with 102,400 tokens a row. That 1.3B models of
other architectures train is shown by `--only 1.3B-recomputed --steps 3 --architectures rwkv-7 mamba-2`.

The peak of an H100 or H200 is 989e12 operations a second in bf16 without sparsity (NVIDIA's data sheet); for other GPUs
`mfu` is empty. `linear` is the rate divided by that of one card times the cards. On one card, DDP and FSDP do the same,
so that is measured once.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from basecap.models.config import ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import plan_runs
from basecap.study.config import load_study
from basecap.system.environment import choose_device, describe
from basecap.train.config import TrainConfig
from basecap.train.copies import lay_out
from basecap.train.distributed import Processes, processes
from basecap.train.optim import build_optimiser, clip_gradients
from basecap.train.placement import DevicePlacement

VOCAB, WARM = 32_000, 4
PEAKS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}
#: Seconds that an entry may take, and those for `torchrun` to stop its processes.
LIMIT, GRACE = 240.0, 20.0


@dataclass(frozen=True)
class Case:
    """A model and how it trains; `rows` sequences for each card, in forward passes of `micro` rows."""

    hidden: int
    layers: int
    rows: int
    micro: int
    parallel: str
    checkpointing: bool | Literal["selective"] = False
    length: int = 2048
    study: str = ""

    def architectures(self, asked: list[str]) -> list[str]:
        """Return those to measure: those of the study if there is one, else what was asked for."""
        return list(self._models()) if self.study else asked

    def model(self, architecture: str, vocab: int) -> ModelConfig:
        """Return the model of an architecture."""
        if self.study:
            return self._models()[architecture]
        return model_config(architecture, hidden=self.hidden, vocab=vocab, layers=self.layers, max_length=self.length)

    def _models(self) -> dict[str, ModelConfig]:
        settings = [f"model.hidden={self.hidden}", f"model.layers={self.layers}", f"data.seq_len={self.length}"]
        study = load_study(self.study, settings)
        return {run.architecture: run.model for run in plan_runs(study, study.vocabulary)}


CASES = {
    "110M-ddp": Case(768, 12, 32, 32, "ddp"),
    "110M-fsdp": Case(768, 12, 32, 32, "fsdp"),
    "1.3B-ddp": Case(2048, 24, 16, 8, "ddp"),
    "1.3B-fsdp": Case(2048, 24, 16, 8, "fsdp"),
    "1.3B-recomputed": Case(2048, 24, 32, 32, "fsdp", True),
    "figure-7": Case(768, 12, 1, 1, "ddp", True, 102_400, "bc-figure-7"),
}
#: Such as take seconds on a CPU, to try this script.
SMALL = {
    "tiny-ddp": Case(64, 2, 2, 1, "ddp", length=64),
    "tiny-fsdp": Case(64, 2, 2, 1, "fsdp", length=64),
    "tiny-recomputed": Case(64, 2, 2, 1, "fsdp", "selective", 64),
    "tiny-study": Case(64, 2, 1, 1, "ddp", True, 64, "bc-figure-7"),
}


def measure(case: Case, architecture: str, device: torch.device, group: Processes, steps: int) -> dict[str, Any]:
    """Return the numbers of an entry; all processes call this together."""
    vocab = VOCAB if device.type == "cuda" else 256
    batch, tokens = case.rows * group.world, case.rows * case.length * group.world
    options = {"micro_batch": case.micro, "parallel": case.parallel, "checkpointing": case.checkpointing}
    config = TrainConfig(tokens=tokens, batch=batch, **options)
    placement = DevicePlacement.choose(device, group, "auto")
    model = LanguageModel(case.model(architecture, vocab), checkpointing=case.checkpointing).initialise(0)
    flops, parameters = model.training_flops(case.length) / case.length, model.parameters_count()
    layout = lay_out(model.to(device), config, group)
    optimiser = build_optimiser(model, model.recipe(), config)
    generator = torch.Generator(device).manual_seed(group.rank)
    parts, taken = case.rows // case.micro, []
    for _ in range(WARM + steps):
        began = time.perf_counter()
        optimiser.zero_grad()
        total = torch.zeros((), device=device)
        for part in range(parts):
            rows = torch.randint(0, vocab, (case.micro, case.length + 1), generator=generator, device=device)
            with layout.without_sync(part + 1 == parts):
                with placement.autocast():
                    loss = layout.module(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / parts
                loss.backward()
                total += loss.detach()
        norm = layout.total(clip_gradients(model, config)).detach()
        mean, _ = torch.stack([group.mean(total), norm]).tolist()  # read here, as in a run
        optimiser.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(round(time.perf_counter() - began, 5))
    rate = tokens / group.world / statistics.median(taken[WARM:])
    found = {
        "parameters": parameters,
        "loss": mean,
        "first steps s": taken[:WARM],
        "steps s": taken[WARM:],
        "tokens_per_s": rate * group.world,
        "tokens_per_s_and_card": rate,
    }
    return found if device.type == "cpu" else found | _of_gpu(device, rate * flops)


def _of_gpu(device: torch.device, operations: float) -> dict[str, Any]:
    """Return the peak of the memory, and `operations` a second as a share of what the GPU can do."""
    name = torch.cuda.get_device_name(device)
    peak = next((found for start, found in PEAKS.items() if name.startswith(start)), None)
    return {
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "mfu": None if peak is None else operations / peak,
    }


def work(options: argparse.Namespace) -> int:
    """Measure the one entry asked for in this process and those beside it; the leading one writes it."""
    device = choose_device("cpu" if options.small else None)
    (name,), (architecture,) = options.only, options.architectures
    if device.type == "cpu":
        torch.set_num_threads(1)
    with processes(device) as group:
        try:
            found = measure((SMALL if options.small else CASES)[name], architecture, device, group, options.steps)
        except torch.OutOfMemoryError:
            options.out.write_text(json.dumps({"failed": "the memory of a card is full"}))
            return 1
        if group.is_leader:
            options.out.write_text(json.dumps({"machine": describe(device), **found}))
    return 0


def measured(part: Path, cards: int, own: list[str], limit: float) -> dict[str, Any]:
    """Return what the processes of an entry wrote, or how it failed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards}"]
    process = subprocess.Popen([*launcher, "-m", "benchmarks.cards", str(part), "--worker", *own])
    try:
        code = process.wait(limit)
        lost: dict[str, Any] = {"failed": f"exit code {code}; its output says why"}
    except subprocess.TimeoutExpired:
        lost = {"failed": f"not done after {limit:.0f} s"}
    finally:
        process.terminate()  # on which torchrun stops its processes
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        return json.loads(part.read_text())
    except FileNotFoundError:
        return lost
    finally:
        part.unlink(missing_ok=True)


def entries(options: argparse.Namespace) -> list[tuple[int, str, str]]:
    """Return cards, model and architecture of each entry; those that are the same on one card come once."""
    cases, found, seen = SMALL if options.small else CASES, [], set()
    for cards in options.cards:
        for name in options.only or [name for name in cases if not cases[name].study]:
            for architecture in cases[name].architectures(options.architectures):
                alike = (cards, cases[name].parallel if cards > 1 else "", *alone(cases[name], architecture))
                if alike not in seen:
                    seen.add(alike)
                    found.append((cards, name, architecture))
    return found


def alone(case: Case, architecture: str) -> tuple[Any, ...]:
    """Return what an entry has in common with the same work on one card."""
    return architecture, *(value for key, value in asdict(case).items() if key != "parallel")


def main() -> int:
    """Measure entries one after the other; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=[*CASES, *SMALL], help="default: all but figure-7")
    parser.add_argument("--architectures", nargs="+", default=["transformer++"], help="default: transformer++")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed (default: 12)")
    parser.add_argument("--seconds", type=float, default=520, help="for the whole command (default: 520)")
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the processes of an entry end, too
    end, cases = time.monotonic() + options.seconds - GRACE, SMALL if options.small else CASES
    machine: dict[str, Any] = {}
    rates: dict[tuple[Any, ...], float] = {}
    rows = []
    for cards, name, architecture in entries(options):
        row: dict[str, Any] = {"cards": cards, "name": name, "architecture": architecture} | asdict(cases[name])
        own = ["--only", name, "--architectures", architecture, "--steps", str(options.steps)]
        own += ["--small"] if options.small else []
        left, began = end - time.monotonic(), time.monotonic()
        part = options.out.with_name(f"{options.out.name}.part")
        late: dict[str, Any] = {"failed": "not begun: no time was left"}
        found = measured(part, cards, own, min(left, LIMIT)) if left > 0 else late
        machine = found.pop("machine", machine)
        row |= found | {"whole s": round(time.monotonic() - began, 1)}
        if "tokens_per_s" in row:
            key = alone(cases[name], architecture)
            if cards == 1:
                rates[key] = row["tokens_per_s"]
            row["linear"] = row["tokens_per_s"] / rates[key] / cards if key in rates else None
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Training speed of whole models: every architecture at one size, in one run, on one device."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from basecap.environment import describe
from basecap.mixers._contract import ARCHITECTURES
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.progress import progress
from basecap.train.config import TrainConfig
from basecap.train.optim import build_optimiser

#: Nominal dense bf16 operations per second, by a part of the device's name; MFU is relative to it.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def run(
    names: Sequence[str] = (),
    *,
    device: torch.device,
    hidden: int = 768,
    vocab: int = 32_000,
    length: int = 2048,
    batch: int = 16,
    steps: int = 10,
) -> dict[str, Any]:
    """Time training steps (forward, backward, AdamW) of architectures; return the environment and a row for each.

    Compilation and three warm-up steps are not counted; a row holds the median over `steps` steps. On a GPU products
    run in bf16 and models are compiled, on a CPU neither.

    Args:
        names: architectures; all when empty.
        device: where to run.
        hidden: model width.
        vocab: vocabulary size.
        length: tokens per sequence.
        batch: sequences per step.
        steps: steps timed.
    """
    rows = []
    chosen = list(names) or ARCHITECTURES.names()
    with progress("bench models", total=len(chosen), unit="architectures") as advance:
        for name in chosen:
            config = model_config(name, hidden=hidden, vocab=vocab, max_length=length)
            model = LanguageModel(config).initialise(0).to(device)
            rows.append({"architecture": name, **_row(model, device, batch, steps)})
            advance(1, note=name)
            del model
            _release(device)
    fastest = rows[0]["tokens_per_s"]
    for row in rows:
        row[f"relative to {rows[0]['architecture']}"] = row["tokens_per_s"] / fastest
    setting = {"hidden": hidden, "vocab": vocab, "length": length, "batch": batch, "steps": steps}
    return {"environment": describe(device), "setting": setting, "rows": rows}


def _row(model: LanguageModel, device: torch.device, batch: int, steps: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    length = model.config.max_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab, (batch, length + 1), generator=generator).to(device)
    optimiser = build_optimiser(model, model.recipe(), TrainConfig(tokens=1))
    if on_gpu:
        model.compile_training()

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimiser.step()

    seconds = _median(step, steps, device)
    flops = 3.0 * model.flops(length) * batch
    peak = next((rate for part, rate in PEAK.items() if part in describe(device)["device"]), None)
    return {
        "parameters": model.parameters_count(),
        "tokens_per_s": batch * length / seconds,
        "ms_per_step": 1e3 * seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else None,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
    }


def _median(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the median seconds of a call, after three calls that do not count."""
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

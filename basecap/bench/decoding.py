"""Decoding speed of whole models: prompts are read, then text is written token by token through the caches."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from basecap.bench.contenders import Contenders, Row, entries, label
from basecap.bench.models import Job, measure
from basecap.models.config import ModelConfig
from basecap.models.decoding_speed import Alone, Load, time_alone, time_decoding
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.system.environment import describe
from basecap.train.config import TrainConfig
from basecap.train.placement import start_compilers

#: Nominal bytes per second of the memory, by a part of the device's name.
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
#: What rows are compared by, and how the keys of the ratios start.
SPEEDS = {
    "prefill_tokens_per_s": "prefill ",
    "decode_tokens_per_s": "decode ",
    "alone_python_tokens_per_s": "alone, from Python, ",
    "alone_tokens_per_s": "alone, as a graph, ",
}


def run(
    contenders: Contenders,
    load: Load,
    *,
    device: torch.device,
    alone: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time reading prompts and decoding; return the environment and a row for each model.

    Weights and caches are bfloat16 on a GPU and float32 on a CPU. Compilation, tuning and a first run of everything are
    not counted. On a GPU prompts are read by compiled code; `first_token_python_seconds` is the time without it, which
    is also what a CPU does. `decode_tokens_per_s` is that of a CUDA graph of `load.tokens` compiled steps, each of
    which reads the most likely token of the one before; `decode_python_tokens_per_s` that of the same steps, not
    compiled, launched from Python, which is also what a CPU does. `bandwidth` is the share of the device's memory
    bandwidth at which reading all weights and the whole state once a step would take as long; above 1, a step reads a
    part of its state. `alone_python_tokens_per_s` and `alone_tokens_per_s` are of one sequence, see `time_alone`.
    With `alone` only these are measured, and no layer is compiled.
    A model that cannot run gets a row whose note says why. When interrupted, the rows so far are returned and
    `complete` is False.

    Args:
        contenders: models by name, see `basecap.bench.contenders`; the others are compared with the first.
        load: how much is read and written.
        device: where to run.
        alone: measure one sequence only.
        save: called after each row with all that is found so far.
    """
    jobs: list[Job]
    if alone:
        jobs = [(name, None, partial(_measure_alone, config, load, device)) for name, config in contenders.items()]
    else:
        start_compilers(device, TrainConfig(tokens=1))
        timed: dict[str, Alone] = {}  # whatever attention a row chooses
        jobs = [
            (name, attention, partial(_measure, name, config, load, device, timed))
            for name, attention, config in entries(contenders, device)
        ]
    found: dict[str, Any] = {"environment": describe(device), "load": asdict(load), "complete": False, "rows": []}
    measure("bench generate", jobs, found, speeds=SPEEDS, device=device, save=save)
    return found


def operations(contenders: Contenders, load: Load) -> float:
    """Return the operations of reading all prompts once."""
    return load.batch * sum(outline(config).flops(load.prompt) for config in contenders.values())


def shown(row: Row) -> Row:
    """Return what a table on the terminal shows of a row."""
    state, note = row.get("state_bytes"), row.get("note")
    cells = {
        "architecture": label(row),
        "first token, s": row.get("first_token_seconds"),
        "not compiled": row.get("first_token_python_seconds"),
        "prefill, tokens/s": row.get("prefill_tokens_per_s"),
        "decoding, tokens/s": row.get("decode_tokens_per_s"),
        "from Python": row.get("decode_python_tokens_per_s"),
        "state, MB": None if state is None else state / 1e6,
        "memory, GiB": row.get("peak_memory_gib"),
        "bandwidth": row.get("bandwidth"),
        **{key.replace(" relative to ", " / "): value for key, value in _ratios(row).items()},
        "note": note,
    }
    return {name: value for name, value in cells.items() if value is not None}


def shown_alone(rows: Sequence[Row]) -> list[Row]:
    """Return what a table on the terminal shows of how one sequence is written, in tokens/s: a row an architecture."""
    first = rows[0]["architecture"] if rows else ""
    found: dict[str, Row] = {}
    for row in rows:
        cells = {"architecture": row["architecture"]}
        for kind in ("from Python", "as a graph"):
            cells[kind] = row.get(f"alone_{'python_' if kind == 'from Python' else ''}tokens_per_s")
            ratios = [value for key, value in row.items() if key.startswith(f"alone, {kind}, relative to ")]
            cells[f"{kind} / {first}"] = ratios[-1] if ratios else None
        if "alone_python_tokens_per_s" not in row and "note" in row:
            cells["note"] = row["note"]
        found.setdefault(row["architecture"], cells)
    return [*found.values()]


def _ratios(row: Row) -> Row:
    return {key: row[key] for key in row if " relative to " in key and not key.startswith("alone, ")}


def _model(config: ModelConfig, device: torch.device) -> LanguageModel:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return LanguageModel(config).initialise(0).to(device, dtype).eval()


def _measure_alone(config: ModelConfig, load: Load, device: torch.device) -> Row:
    model = _model(config, device)
    return {"parameters": model.parameters_count(), **_speeds(time_alone(model, load))}


def _speeds(one: Alone) -> Row:
    graph = {} if one.graph is None else {"alone_tokens_per_s": 1 / one.graph}
    return {"alone_python_tokens_per_s": 1 / one.python, **graph}


def _measure(name: str, config: ModelConfig, load: Load, device: torch.device, timed: dict[str, Alone]) -> Row:
    model = _model(config, device)
    one = timed[name] = timed.get(name) or time_alone(model, load)
    times = time_decoding(model, load)
    dtype = model.embedding.weight.dtype
    state = load.batch * model.state_bytes(load.length)
    read = state + dtype.itemsize * (model.parameters_count() - (0 if config.tied else model.embedding.weight.numel()))
    peak = next((peak for part, peak in BANDWIDTH.items() if part in describe(device)["device"]), None)
    return {
        "parameters": model.parameters_count(),
        "first_token_seconds": times.first_token,
        "first_token_python_seconds": times.first_token_python,
        "prefill_tokens_per_s": load.batch * load.prompt / times.first_token,
        "decode_tokens_per_s": load.batch / times.token,
        "decode_python_tokens_per_s": load.batch / times.token_python,
        "ms_per_token": 1e3 * times.token,
        **_speeds(one),
        "state_bytes": state,
        "bandwidth": read / times.token / peak if peak else None,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    } | ({"note": times.notes} if times.notes else {})

"""Decoding speed of whole models: prompts are read, then text is written token by token through the caches."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from basecap.bench.contenders import Contenders, Row, entries, label
from basecap.bench.models import SLOW, measure
from basecap.errors import ConfigError
from basecap.models.blocks import BlockCache
from basecap.models.config import ModelConfig
from basecap.models.generate import read_prompts
from basecap.models.language_model import LanguageModel
from basecap.system.cuda_graph import captured
from basecap.system.environment import describe

#: Nominal bytes per second of the memory, by a part of the device's name.
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
#: What rows are compared by, and how the keys of the ratios start.
SPEEDS = {"prefill_tokens_per_s": "prefill ", "decode_tokens_per_s": "decode "}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every model reads and writes; the defaults are the load per GPU of Table 3 of arXiv 2505.18522.

    Attributes:
        prompt: tokens of each prompt.
        new: tokens that follow each.
        batch: sequences.
        rows: sequences whose prompts are read at once; None: all.
        places: where in the new tokens decoding is measured, evenly spread: its speed may depend on the length.
        tokens: consecutive tokens of one measurement, captured as one CUDA graph.
        repeats: measurements at each place; the median counts.
    """

    prompt: int = 51_200
    new: int = 5_120
    batch: int = 8
    rows: int | None = None
    places: int = 3
    tokens: int = 32
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.new < self.tokens:
            raise ConfigError(f"decoding is measured over {self.tokens} tokens at a time; raise --new from {self.new}.")
        if self.rows is not None and self.batch % self.rows:
            raise ConfigError(f"{self.rows} prompts at once do not divide a batch of {self.batch}; choose a divisor.")

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.prompt + self.new

    @property
    def starts(self) -> list[int]:
        """Tokens that the caches hold at the start of each measurement; fewer than `places` where there is no room."""
        room = self.new - self.tokens
        places = min(self.places, room + 1)
        return [self.prompt + round((index + 0.5) / places * room) for index in range(places)]


def run(
    contenders: Contenders,
    load: Load = Load(),
    *,
    device: torch.device,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time reading prompts and decoding; return the environment and a row for each model.

    Weights and caches are bfloat16 on a GPU and float32 on a CPU. Compilation, tuning and a first run of everything are
    not counted. On a GPU prompts are read by compiled code; `first_token_python_seconds` is the time without it, which
    is also what a CPU does. `decode_tokens_per_s` is that of a CUDA graph of `load.tokens` compiled steps, each of
    which reads the most likely token of the one before; `decode_python_tokens_per_s` that of the same steps, not
    compiled, launched from Python, which is also what a CPU does. `bandwidth` is the share of the device's memory
    bandwidth at which reading all weights and the whole state once a step would take as long; above 1, a step reads a
    part of its state.
    A model that cannot run gets a row whose note says why. When interrupted, the rows so far are returned and
    `complete` is False.

    Args:
        contenders: models by name, see `basecap.bench.contenders`; the others are compared with the first.
        load: how much is read and written.
        device: where to run.
        save: called after each row with all that is found so far.
    """
    jobs = [
        (name, attention, partial(_measure, config, load, device))
        for name, attention, config in entries(contenders, device)
    ]
    found: dict[str, Any] = {"environment": describe(device), "load": asdict(load), "complete": False, "rows": []}
    measure("bench generate", jobs, found, speeds=SPEEDS, device=device, save=save)
    return found


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
        **{key.replace(" relative to ", " / "): value for key, value in row.items() if " relative to " in key},
        "note": note,
    }
    return {name: value for name, value in cells.items() if value is not None}


def _measure(config: ModelConfig, load: Load, device: torch.device) -> Row:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LanguageModel(config).initialise(0).to(device, dtype).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab, (load.batch, load.prompt), generator=generator).to(device)
    with torch.no_grad():
        prefill, caches = _prefill_seconds(model, prompts, load)
        decode = _decode_seconds(model, caches, load, device)
    first_token = prefill["compiled"] if prefill["compiled"] is not None else prefill["python"]
    notes = "; ".join(found["note"] for found in (prefill, decode) if found["note"])
    seconds = decode["graph"] if decode["graph"] is not None else decode["python"]
    state = load.batch * model.state_bytes(load.length)
    read = state + dtype.itemsize * (model.parameters_count() - (0 if config.tied else model.embedding.weight.numel()))
    peak = next((peak for part, peak in BANDWIDTH.items() if part in describe(device)["device"]), None)
    return {
        "parameters": model.parameters_count(),
        "first_token_seconds": first_token,
        "first_token_python_seconds": prefill["python"],
        "prefill_tokens_per_s": load.batch * load.prompt / first_token,
        "decode_tokens_per_s": load.batch / seconds,
        "decode_python_tokens_per_s": load.batch / decode["python"],
        "ms_per_token": 1e3 * seconds,
        "state_bytes": state,
        "bandwidth": read / seconds / peak if peak else None,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    } | ({"note": notes} if notes else {})


def _prefill_seconds(model: LanguageModel, prompts: Tensor, load: Load) -> tuple[dict[str, Any], list[BlockCache]]:
    """Return the seconds until the first new token, from Python and compiled, and caches that hold the prompts."""
    python, caches = _read_seconds(model, prompts, load)
    if prompts.device.type != "cuda":
        return {"python": python, "compiled": None, "note": None}, caches
    del caches  # those of a large batch do not fit twice
    compiled = copy.copy(model)
    compiled.compile_prefill()
    try:
        seconds, caches = _read_seconds(compiled, prompts, load)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        note = f"prompts read from Python, as that cannot be compiled: {str(error).splitlines()[0][:160]}"
        python, caches = _read_seconds(model, prompts, load)
        return {"python": python, "compiled": None, "note": note}, caches
    return {"python": python, "compiled": seconds, "note": None}, caches


def _read_seconds(model: LanguageModel, prompts: Tensor, load: Load) -> tuple[float, list[BlockCache]]:
    """Return the median seconds until the first new token, and caches that hold the prompts."""
    times: list[float] = []
    rows, device = load.rows or load.batch, prompts.device
    caches = model.init_cache(rows, load.length)
    model.prefill(prompts[:rows], caches).argmax(-1)  # tunes
    while len(times) < (1 if times and times[0] > SLOW else load.repeats):
        del caches
        caches = model.init_cache(load.batch, load.length)
        with _clock(device) as seconds:
            read_prompts(model, prompts, caches, rows).argmax(-1)
        times += seconds
    return statistics.median(times), caches


def _decode_seconds(model: LanguageModel, caches: list[BlockCache], load: Load, device: torch.device) -> dict[str, Any]:
    """Return the seconds per token, means over the places, launched from Python and compiled as a CUDA graph."""
    token = torch.zeros((load.batch, 1), dtype=torch.int64, device=device)
    places = [partial(_steps, model, caches, token, start, load.tokens) for start in load.starts]
    python = statistics.mean(_median(steps, load.repeats, device) for steps in places) / load.tokens
    graph, note = None, None
    if device.type == "cuda":
        model.compile_decoding()
        try:
            graph = statistics.mean(_median(captured(steps), load.repeats, device) for steps in places) / load.tokens
        except RuntimeError as error:
            note = f"launched from Python, as it cannot be a CUDA graph: {str(error).splitlines()[0][:160]}"
    return {"python": python, "graph": graph, "note": note}


def _steps(model: LanguageModel, caches: list[BlockCache], token_B1: Tensor, start: int, count: int) -> None:
    """Decode `count` tokens after `start` tokens, each the most likely one; the last one stays in `token_B1`.

    Caches go back to `start` first: run again, this writes to the same places of the same tensors.
    """
    for cache in caches:
        cache.mixer.length = cache.feed_forward.length = start
    for _ in range(count):
        token_B1.copy_(model.step(token_B1, caches).argmax(-1, keepdim=True))


def _median(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median seconds of `run` after one that does not count."""
    times: list[float] = []
    for _ in range(repeats + 1):
        with _clock(device) as seconds:
            run()
        times += seconds
    return statistics.median(times[1:])


@contextlib.contextmanager
def _clock(device: torch.device) -> Iterator[list[float]]:
    """Measure a block: the list holds its seconds afterwards, until the device is done."""
    seconds: list[float] = []
    _wait(device)
    began = time.perf_counter()
    yield seconds
    _wait(device)
    seconds.append(time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

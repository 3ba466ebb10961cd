"""How long a model takes to read prompts and to write text token by token through the caches."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from basecap.errors import ConfigError
from basecap.models.blocks import BlockCache
from basecap.models.decoding_steps import GraphSteps, Lengths, PythonSteps, Steps, refusal
from basecap.models.generate import read_prompts
from basecap.models.language_model import LanguageModel
from basecap.system.cuda_graph import captured

#: Prompts that take longer than this many seconds to read are read once.
SLOW = 5.0
#: The most tokens before a sequence that is written alone, and its steps that do not count: one compiles, one captures.
ALONE, WARM_UP = 2048, 4
#: PyTorch's own choice among the kernels of its attention.
EVERY_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every model reads and writes; the defaults are the load per GPU of Table 3 of arXiv 2505.18522.

    Attributes:
        prompt: tokens of each prompt.
        new: tokens that follow each.
        batch: sequences.
        rows: sequences whose prompts are read at once; None: all.
        places: where in the new tokens decoding is measured, evenly spread: its speed may depend on the length. Fewer
            where measurements would overlap.
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
    def alone(self) -> "Load":
        """What `time_alone` reads and writes of it."""
        return replace(self, prompt=min(self.prompt, ALONE), batch=1, rows=None)

    @property
    def starts(self) -> list[int]:
        """Tokens that the caches hold at the start of each measurement."""
        room, places = self.new - self.tokens, min(self.places, self.new // self.tokens)
        return [self.prompt + round((index + 0.5) / places * room) for index in range(places)]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a load: compiled and as a CUDA graph on a GPU, else those that Python takes, which are always given.

    Attributes:
        first_token: until the first new token of every sequence.
        token: for one more token of every sequence.
        first_token_python, token_python: the same, launched from Python.
        notes: why something could not be compiled, "" where it could.
    """

    first_token: float
    token: float
    first_token_python: float
    token_python: float
    notes: str


class Alone(NamedTuple):
    """Seconds for a token of one sequence: from Python, and as a CUDA graph; None: there is none."""

    python: float
    graph: float | None


@torch.no_grad()
def time_decoding(model: LanguageModel, load: Load) -> Times:
    """Time a model on random prompts, on its device and in its dtype; compilation and a first run are not counted."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, model.config.vocab, (load.batch, load.prompt), generator=generator).to(device)
    prefill, caches = _prefill_seconds(model, prompts, load)
    decode = _decode_seconds(model, caches, load, device)
    return Times(
        first_token=prefill["python"] if prefill["compiled"] is None else prefill["compiled"],
        token=decode["python"] if decode["graph"] is None else decode["graph"],
        first_token_python=prefill["python"],
        token_python=decode["python"],
        notes="; ".join(found["note"] for found in (prefill, decode) if found["note"]),
    )


@torch.no_grad()
def time_alone(model: LanguageModel, load: Load) -> Alone:
    """Time how one sequence is written, as `basecap generate` does: greedily, and each token is read by Python.

    The prompt is at most `ALONE` tokens, and no more than `load.new` follow. PyTorch chooses the kernel of its
    attention: a graph needs one with a mask.
    """
    with sdpa_kernel(EVERY_ATTENTION):
        python = _alone_seconds(model, load, graph=False)
        assert python is not None
        on_gpu = model.embedding.weight.is_cuda
        return Alone(python, _alone_seconds(model, load, graph=True) if on_gpu and refusal(model) is None else None)


def _alone_seconds(model: LanguageModel, load: Load, *, graph: bool) -> float | None:
    """Return the seconds for a token of one sequence; None if it should be a graph and cannot be captured."""
    device, length = model.embedding.weight.device, load.alone.prompt
    tokens = max(1, min(load.tokens, (load.new - WARM_UP) // load.repeats))
    most = length + WARM_UP + tokens * load.repeats
    prompt = torch.randint(0, model.config.vocab, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    caches = model.init_cache(1, most)
    token = model.prefill(prompt, caches).argmax(-1)
    lengths = Lengths(torch.tensor([length], device=device), length, most)
    graphs = GraphSteps(model, caches, _likeliest, lengths) if graph else None
    steps: Steps = graphs or PythonSteps(model, caches, _likeliest)
    times: list[float] = []
    for count in (WARM_UP, *[tokens] * load.repeats):
        with _clock(device) as seconds:
            for _ in range(count):
                token = steps(token, token)
                token.tolist()
        times.append(seconds[0] / count)
    return None if graphs is not None and not graphs.captured else statistics.median(times[1:])


def _likeliest(logits_BV: Tensor, draws_B: Tensor) -> Tensor:
    return logits_BV.argmax(-1)


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

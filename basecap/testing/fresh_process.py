"""A process that has read nothing yet computes losses of a trained model from its checkpoint.

State outside the model, such as a global variable of a plugin file, is the same for every copy of the model within one
process. In a new process it is as the plugin file begins, so losses that depend on such state differ there.

Unlike a worker of `basecap.system.processes` it is killed when it is late, and what a plugin prints in it goes nowhere.
Questions and answers are JSON, whose numbers are those of the tensors to the bit.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from basecap.errors import BasecapError, describe_error
from basecap.mixers import ARCHITECTURES
from basecap.plugins import load_plugin
from basecap.system.environment import choose_device, limit_processors
from basecap.train.checkpoint import load_unaveraged

#: What the new process runs: it imports from the same places as this one, and not from its working directory.
PROGRAM = "import sys; sys.path[:] = {path!r}; from basecap.testing.fresh_process import answer; answer()"
#: Bytes of GPU memory that a process needs besides twice its weights: for CUDA itself and for few windows.
SPACE = 2 * 2**30

#: Two tensors of one batch: inputs and targets.
Batch = tuple[Tensor, Tensor]
#: The states of the random generators of PyTorch: of the CPU and, where it is used, of a GPU.
Draws = list[Tensor]


class NotRunError(Exception):
    """A test that could not run, which says nothing of the model."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """Where another process finds a model: the checkpoint with its weights, and the digest of each plugin file."""

    weights: Path
    plugins: Mapping[Path, str]

    def size(self) -> int:
        """Return the bytes of the weights; a checkpoint in parts has those of the optimiser with them."""
        own = self.weights / "model.safetensors"
        files = [own] if own.exists() else self.weights.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a new process computes: the losses of each batch, on a device, with the given state of random generators."""

    model: StoredModel
    device: str
    bf16: bool
    threads: int
    draws: Draws
    batches: Sequence[Batch]

    def content(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "weights": str(self.model.weights),
            "plugins": {str(path): digest for path, digest in self.model.plugins.items()},
            "device": self.device,
            "bf16": self.bf16,
            "threads": self.threads,
            "draws": [state.tolist() for state in self.draws],
            "batches": [[part.tolist() for part in batch] for batch in self.batches],
        }


class FreshProcess:
    """A new process, which imports what models need while this one works and then waits for questions."""

    _answer: "Future[tuple[bytes, bytes]] | None" = None

    def __init__(self) -> None:
        """Start it, in a session of its own: signals of the terminal are for this process."""
        program = PROGRAM.format(path=[entry or os.getcwd() for entry in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "FreshProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        if self._answer is not None:
            wait([self._answer])
        self._process.communicate()

    def ask(self, questions: Sequence[Question], seconds: float) -> None:
        """Let the process compute the losses of each batch of each question, for `answers`; it can be asked once.

        This one goes on meanwhile. The process gives up after so many seconds.
        """
        asked = json.dumps([question.content() for question in questions]).encode()
        pool = ThreadPoolExecutor(1)  # the question is longer than a pipe takes before the process reads
        self._answer = pool.submit(self._process.communicate, asked, seconds)
        pool.shutdown(wait=False)

    @property
    def asked(self) -> bool:
        """Whether `ask` was called."""
        return self._answer is not None

    def answers(self) -> list[list[Tensor]]:
        """Wait for the losses of each batch of each question, float64 [B, T], and return them.

        Raises:
            NotRunError: the process took too long, was killed, found no memory, or another plugin file.
            RuntimeError: whatever the code of the model raised.
        """
        assert self._answer is not None
        try:
            output, _ = self._answer.result()
        except subprocess.TimeoutExpired as late:
            raise NotRunError(f"it took more than {late.timeout:.0f} s") from None
        if not output and self._process.returncode < 0:
            raise NotRunError("its process was killed, possibly out of memory")
        if not output:
            raise RuntimeError("a new process ended without an answer")
        answer = json.loads(output)
        if "not run" in answer:
            raise NotRunError(answer["not run"])
        if "raised" in answer:
            raise RuntimeError(f"in a new process: {answer['raised']}")
        return [[torch.tensor(losses, dtype=torch.float64) for losses in found] for found in answer["losses"]]


def lack_of_memory(question: Question) -> str | None:
    """Return what a new process would need of a GPU's memory, None where that is free, or the device is a CPU."""
    device = torch.device(question.device)
    if device.type != "cuda":
        return None
    needed, free = 2 * question.model.size() + SPACE, torch.cuda.mem_get_info(device)[0]
    return None if free >= needed else f"{needed / 2**30:.1f} GiB of {device}, which has {free / 2**30:.1f} free"


def answer() -> None:
    """Answer the questions on standard input; what a plugin prints goes nowhere."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        found: dict[str, Any]
        try:
            _import_ahead()
            found = {"losses": [_losses(question) for question in json.load(sys.stdin)]}
        except (BasecapError, MemoryError, torch.OutOfMemoryError) as error:
            found = {"not run": describe_error(error)}
        except (Exception, SystemExit) as error:  # whatever a plugin's code raises
            found = {"raised": describe_error(error)}
        output.write(json.dumps(found).encode())


def _import_ahead() -> None:
    """Import what takes seconds: all mixers, and what PyTorch imports when the first custom operator runs."""
    import torch._dynamo  # noqa: F401

    ARCHITECTURES.names()


@torch.no_grad()
def _losses(question: Mapping[str, Any]) -> list[list[list[float]]]:
    """Return the losses of each batch of a question, [B, T]."""
    device = choose_device(question["device"])
    limit_processors(question["threads"], None)
    for path, digest in question["plugins"].items():
        load_plugin(Path(path), digest)
    model = load_unaveraged(Path(question["weights"])).to(device)
    draws = [torch.tensor(state, dtype=torch.uint8) for state in question["draws"]]
    found = []
    for batch in question["batches"]:
        _set(draws, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=question["bf16"]):
            losses = model.token_losses(*(torch.tensor(part, dtype=torch.int64, device=device) for part in batch))
        found.append(losses.double().tolist())
    return found


def draws_of(device: torch.device) -> Draws:
    """Return the states of the random generators for a device as they are now."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set(draws: Draws, device: torch.device) -> None:
    torch.set_rng_state(draws[0])
    for state in draws[1:]:
        torch.cuda.set_rng_state(state, device)

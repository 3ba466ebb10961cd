"""The model that the test for leaks looks at, and the inputs that replace its embeddings."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from basecap.mixers import generator_for, make_generic
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.ops import recorded
from basecap.testing._causality import Probe, choose_cuts, future, packed, runs

#: Vocabulary size, small because activations replace the embeddings.
VOCAB = 64
#: Distinct vectors in repeated inputs: each returns every few positions, as tokens do in text.
DISTINCT = 4

#: Normally distributed inputs, of which no two are equal, or inputs drawn from few distinct vectors.
Inputs = Literal["normal", "repeated"]
Autocast = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True, kw_only=True)
class ProofSetting:
    """The length and precision of one proof of a model.

    Attributes:
        length: tokens per sequence.
        rows: sequences in a pass.
        seed: of inputs and cuts.
        deadline: of `time.monotonic`, after which no pass begins.
        dtype: of parameters and inputs.
        words: the precision, for messages.
        autocast: context of every pass.
        inputs: what the model reads.
        everywhere: look at every position, in as many passes as that takes.
    """

    length: int
    rows: int
    seed: int
    deadline: float
    dtype: torch.dtype = torch.float64
    words: str = "float64"
    autocast: Autocast = contextlib.nullcontext
    inputs: Inputs = "normal"
    everywhere: bool = False

    def describe(self) -> str:
        """Return the setting as words for messages."""
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        everywhere = ", cut at every position" if self.everywhere else ""
        return f"{self.length} tokens, {rows}, {self.inputs} inputs, {self.words}{everywhere}"


class OutOfTimeError(Exception):
    """The deadline of a proof has passed."""


class Subject:
    """A model of random parameters in one setting, and the inputs that replace its embeddings."""

    def __init__(self, config: ModelConfig, device: torch.device, setting: ProofSetting):
        self.setting, self.device, self.hidden = setting, device, config.hidden
        # A decoder reads the last position for all others, as its task wants; the layers below it must not.
        self._config = config = config.model_copy(update={"vocab": VOCAB, "readout": "each"})
        for generic in (True, False):
            self.model = LanguageModel(config).initialise(0)
            if generic:
                make_generic(self.model)
            self.model.to(device, setting.dtype)
            self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            with torch.no_grad():
                if self(self.random("x", 1), None).isfinite().all():
                    return  # otherwise test the initial parameters
        raise ArithmeticError("its outputs are not finite")

    def __call__(self, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
        """Return the final activations; random numbers and buffers are the same in each pass.

        Every pass has the rows of the setting: the last one repeats the first row of the input.
        """
        count = len(x_BTD)
        parts = self._filled(x_BTD).split(self.setting.rows)
        ids = [None] * len(parts) if segments is None else self._filled(segments).split(self.setting.rows)
        return torch.cat([self._pass(*part) for part in zip(parts, ids, strict=True)])[:count]

    def anew(self) -> "Subject":
        """Return another build of the model, which has read as little as this one had at first, in its mode."""
        built = Subject(self._config, self.device, self.setting)
        built.model.train(self.model.training)
        return built

    def _filled(self, given: Tensor) -> Tensor:
        """Return rows that divide into passes."""
        return torch.cat([given, given[:1].expand(-len(given) % self.setting.rows, *given.shape[1:])])

    def _pass(self, x_BTD: Tensor, segments: Tensor | None) -> Tensor:
        if time.monotonic() > self.setting.deadline:
            raise OutOfTimeError
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        tokens = torch.zeros(x_BTD.shape[:2], dtype=torch.int64, device=self.device)
        handle = self.model.embedding.register_forward_hook(lambda module, inputs, output: x_BTD)
        try:
            with undisturbed(self.device), self.setting.autocast():
                return self.model.hidden(tokens, segments)
        finally:
            handle.remove()

    def random(self, name: str, rows: int) -> Tensor:
        """Return values [rows, T, D] that depend on `name` and the seed only, with the variance 1 in each row."""
        generator = generator_for(self.setting.seed, name)
        if self.setting.inputs == "normal":
            drawn = torch.randn(rows, self.setting.length, self.hidden, generator=generator)
        else:
            # The vectors are the same for all names: what replaces the future has them too, in another order.
            table = torch.randn(DISTINCT, self.hidden, generator=generator_for(self.setting.seed, "distinct vectors"))
            drawn = table[torch.randint(DISTINCT, (rows, self.setting.length), generator=generator)]
        return drawn.to(self.device, self.setting.dtype)

    def signs(self, name: str, rows: int) -> Tensor:
        """Return 1 or -1 that depend on `name`: [rows, T, D], but [1, 1, D] for repeated inputs, which stay equal."""
        if self.setting.inputs == "normal":
            return self.random(name, rows).sign()
        drawn = torch.randn(1, 1, self.hidden, generator=generator_for(self.setting.seed, name))
        return drawn.sign().to(self.device, self.setting.dtype)

    def future(self, most: int | None = None) -> tuple[Probe, list[int]]:
        """Return the probe of later inputs, with `most` rows, and for each row the first position that changes."""
        cuts = (list(range(1, self.setting.length)) if self.setting.everywhere else self._cuts())[:most]
        return future(*self._inputs(len(cuts)), cuts), cuts

    def packed(self) -> Probe:
        """Return the probe of packed documents: what comes before them, and what follows in them or in others."""
        length = self.setting.length
        if self.setting.everywhere:
            own = runs(length, length // 2)
        else:
            position = torch.arange(length)
            own = torch.stack([(position >= cut // 2) & (position < cut) for cut in self._cuts()[: self.setting.rows]])
        return packed(*self._inputs(len(own)), own.to(self.device))

    def rows(self) -> Probe:
        """Return the probe of sequences; the second must not depend on its neighbours."""
        x, other, weight = self._inputs(self.setting.rows)
        own = (torch.arange(len(x), device=self.device) == 1)[:, None].expand(x.shape[:2])
        return Probe(x=x, changed=torch.where(own[..., None], x, other), own=own, weight=weight)

    def _cuts(self) -> list[int]:
        """Return the positions of `choose_cuts` and, to fill the rows of a pass, random ones."""
        length, rows = self.setting.length, self.setting.rows
        chosen = choose_cuts(length)
        generator = generator_for(self.setting.seed, f"cuts {length}")
        drawn = torch.randint(1, length, (max(0, rows - len(chosen)),), generator=generator)
        return chosen + drawn.tolist()

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, other inputs and weights of the outputs, each [rows, T, D]."""
        return self.random("x", rows), self.random("other", rows), self.random("weight", rows)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Make `device` the current one; PyTorch's random generators and the record of ops come out as they went in."""
    cuda = device.type == "cuda"
    with (
        torch.cuda.device(device) if cuda else contextlib.nullcontext(),
        torch.random.fork_rng([device] if cuda else []),
        recorded(),
    ):
        yield

"""Compares how every parameter of a model starts and trains with a table of the official values.

A table is written from the authors' code, never from this package: its rows say, for a pattern of parameter names, how
the official parameter starts, its learning-rate factor and whether it decays. Each parameter belongs to exactly one row
and each row to some parameter. Where this package differs on purpose, the row says what it does instead and quotes the
sentence of the architecture, or of its backbone, that gives the reason.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from basecap.mixers import ARCHITECTURES, Initialiser, generator_for
from basecap.models import BACKBONES
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel

#: Sizes of the models compared; V / D is no square, so that a forgotten factor shows.
HIDDEN, VOCAB, LENGTH = 128, 160, 64


@dataclass(frozen=True, kw_only=True)
class At:
    """Which parameter it is: of which block of how many, in a model how wide, of what shape."""

    hidden: int
    index: int
    depth: int
    shape: torch.Size

    @property
    def rise(self) -> float:
        """0 in the first block to 1 in the last (RWKV-LM: ratio_0_to_1)."""
        return self.index / (self.depth - 1)

    @property
    def fall(self) -> float:
        """1 in the first block to almost 0 in the last (RWKV-LM: ratio_1_to_almost0)."""
        return 1 - self.index / self.depth

    @property
    def channel(self) -> Tensor:
        """Channel i of D as i / D (RWKV-LM: ddd)."""
        return torch.arange(self.hidden, dtype=torch.float64) / self.hidden

    @property
    def line(self) -> Tensor:
        """Channel i of D as i / (D - 1)."""
        return torch.arange(self.hidden, dtype=torch.float64) / (self.hidden - 1)


@dataclass(frozen=True)
class Exactly:
    """The same values every time."""

    values: Tensor | float

    def check(self, draws: Tensor) -> None:
        values = torch.as_tensor(self.values, dtype=torch.float64)
        expected = values.reshape(draws.shape[1:]) if values.numel() > 1 else values
        torch.testing.assert_close(draws, expected.expand_as(draws), rtol=2e-6, atol=2e-7)


@dataclass(frozen=True)
class Follows:
    """Independent draws from a distribution, given by its cumulative function (Kolmogorov and Smirnov's test)."""

    cumulative: Callable[[Tensor], Tensor]

    def check(self, draws: Tensor) -> None:
        uniform = self.cumulative(draws.flatten()).sort().values
        n = len(uniform)
        steps = torch.arange(n, dtype=torch.float64) / n
        distance = torch.maximum(uniform - steps, steps + 1 / n - uniform).max().item()
        assert distance < 2.2 / math.sqrt(n), f"{distance:.3f} from its distribution, std {draws.std():.4g}"


@dataclass(frozen=True)
class Orthogonal:
    """Orthonormal columns, or rows where there are fewer, times a gain; in a stack each matrix by itself."""

    gain: float

    def check(self, draws: Tensor) -> None:
        matrices = draws.reshape(-1, *draws.shape[-2:])
        wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
        identity = self.gain**2 * torch.eye(wide.shape[-2], dtype=torch.float64)
        torch.testing.assert_close(wide @ wide.mT, identity.expand(len(wide), -1, -1), rtol=0, atol=1e-5 * self.gain**2)


#: How a parameter starts; `check` asserts that independent draws of it, [R, *shape] float64, are as they should be.
Start = Exactly | Follows | Orthogonal


def normal(std: float) -> Follows:
    """Gaussian with mean 0."""
    return Follows(lambda x: 0.5 * (1 + torch.erf(x / (std * math.sqrt(2)))))


def uniform(low: float, high: float) -> Follows:
    """Uniform between two bounds; what lies outside counts as at them, and fails."""
    return Follows(lambda x: torch.where((x < low) | (x > high), 2.0, (x - low) / (high - low)))


def log_of_uniform(low: float, high: float) -> Follows:
    """The logarithm of a uniform value."""
    return Follows(lambda x: uniform(low, high).cumulative(x.exp()))


def steps(low: float, high: float) -> Follows:
    """The inverse softplus of a step size, log-uniform between two bounds."""
    between = uniform(math.log(low) - 1e-5, math.log(high) + 1e-5)
    return Follows(lambda x: between.cumulative(torch.nn.functional.softplus(x).log()))


ZEROS, ONES = Exactly(0.0), Exactly(1.0)


@dataclass(frozen=True)
class Row:
    """Parameters by a pattern of their names in a block (or in the model), how they start and train."""

    pattern: str
    start: Start | Callable[[At], Start]
    lr: float = 1.0
    decay: bool = True
    differs: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The official values of one architecture; `source` as the architecture names it."""

    source: str
    rows: tuple[Row, ...]
    layers: int = 3
    tied: bool = False


def assert_table_holds(name: str, table: Table) -> None:
    """Assert that every parameter of architecture `name` is as its table says, and that the sources are the same."""
    config = model_config(name, hidden=HIDDEN, vocab=VOCAB, layers=table.layers, max_length=LENGTH)
    assert config.tied == table.tied, "another head than published"
    with torch.device("meta"):
        model = LanguageModel(config)
    recipes, used = model.recipe(), set()
    for full, parameter in model.named_parameters():
        block = re.match(r"blocks\.(\d+)\.", full)
        own = full[block.end() :] if block else full
        matching = [row for row in table.rows if re.fullmatch(row.pattern, own)]
        assert len(matching) == 1, f"{full} stands in {len(matching)} rows"
        row = matching[0]
        used.add(row)
        at = At(hidden=config.hidden, index=int(block[1]) if block else 0, depth=config.depth, shape=parameter.shape)
        recipe = recipes[full]
        assert (recipe.lr, recipe.decay) == (row.lr, row.decay), f"{full}: learning-rate factor or weight decay"
        start = row.start if isinstance(row.start, Start) else row.start(at)
        try:
            start.check(draw(recipe.init, parameter.shape, times(start, parameter)).double())
        except AssertionError as error:
            raise AssertionError(f"{name}: {full} does not start as {row.pattern!r} says: {error}") from error
    assert not (spare := set(table.rows) - used), f"no parameter has these names: {[row.pattern for row in spare]}"
    assert_reasons_are_named(name, table)


def assert_reasons_are_named(name: str, table: Table) -> None:
    """Assert that the architecture names the table's source, and the reason of each difference."""
    architecture = ARCHITECTURES.get(name)
    plain = architecture if architecture.source else ARCHITECTURES.get(architecture.variant_of)
    assert plain.source == table.source
    known = " ".join([*plain.differences, *architecture.differences, *BACKBONES.get(architecture.backbone).differences])
    assert not [row.differs for row in table.rows if row.differs not in known]


def times(start: Start, parameter: Tensor) -> int:
    """How often to draw a parameter: until there are 4,096 values to judge a distribution by."""
    return -(-4096 // parameter.numel()) if isinstance(start, Follows) else 1


def draw(init: Initialiser, shape: torch.Size, count: int) -> Tensor:
    """Return independent starts of a parameter, [count, *shape]."""
    generator = generator_for(0, "starts")
    draws = torch.full((count, *shape), torch.nan)
    for start in draws:
        init(start, generator)
    return draws

"""The fixture of the conformance suite: a mixer in float64 with an input and its output, and the tolerance.

There is one tolerance for all checks. The reference is the mixer in float64. Inputs are rounded at least once, so the
effect of a rounding in a dtype is the change of the float64 result when inputs and parameters change by the dtype's
unit roundoff. A mixer accumulates along time, and gradients of parameters along the batch too: B * T roundings add up
as a random walk, so the tolerance is sqrt(B * T) times that change. With 16 bits sums must be accumulated in float32,
so only the roughly 16 tensors between operations add up: 4 times. In float64 errors are maxima, so that a leak at one
position cannot average out; in lower precision they are root mean squares, so that a single choice that flips on a tie
(Top-1) does not hide other errors. Gradients may be as few as two numbers, each a sum whose terms cancel in part; one
change can leave such a sum almost as it was, so that their effect is the root mean square of several.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from basecap.errors import BasecapError, ConfigError, describe_error
from basecap.mixers import (
    Cache,
    LayerChoice,
    LayerSpec,
    Mixer,
    build_mixer,
    declared_recipe,
    error_location,
    generator_for,
    initialise,
    make_generic,
    refuse_other_losses,
    step_rows,
)
from basecap.registry import source_location

BATCH = 2
#: Of parameters and inputs.
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        subject: the architecture, with the number of the layer if it has several.
        name: of the check.
        error, allowed: None if an exception was raised.
        broken: what is wrong if the check failed, for the author of the mixer.
    """

    subject: str
    name: str
    error: float | None
    allowed: float | None
    broken: str

    @property
    def passed(self) -> bool:
        """Whether the error is within bounds (a NaN is not)."""
        return self.error is not None and self.allowed is not None and self.error <= self.allowed

    @property
    def message(self) -> str:
        """One sentence about a failed check."""
        if self.error is None:
            return f"{self.subject}: {self.name} {self.broken}."
        # A check with an allowed error of 0 is a yes or no, which has no size.
        sized = self.allowed and self.error < math.inf
        size = f", by {self.error:.3g} with {self.allowed:.2g} allowed" if sized else ""
        return f"{self.subject}: {self.name} failed: {self.broken}{size}."


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """All checks of one architecture."""

    architecture: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The failed checks."""
        return tuple(check for check in self.checks if not check.passed)

    def raise_failures(self) -> None:
        """Raise AssertionError with one sentence per failed check, if there are any."""
        if self.failures:
            raise AssertionError("\n".join(check.message for check in self.failures))


class Layers(nn.Module):
    """The first or last of two layers, or both (with a residual) if layers share values."""

    def __init__(self, choice: LayerChoice, config: Any, hidden: int, max_length: int, last: bool = False):
        super().__init__()
        chosen = (0, 1) if choice.mixer.takes_shared else (int(last),)
        specs = (LayerSpec(hidden=hidden, index=i, depth=2, max_length=max_length) for i in chosen)
        self.mixers = cast(Sequence[Mixer], nn.ModuleList(build_mixer(choice.mixer, config, spec) for spec in specs))

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix a batch."""
        return self._chain(x_BTD, lambda mixer, i, x, *shared: mixer(x, segments, *shared))

    def losses(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """Return the auxiliary losses of the layers that have some."""
        found: dict[str, Tensor] = {}

        def run(mixer: Mixer, i: int, x: Tensor, *shared: dict[str, Tensor]) -> Tensor:
            own: dict[str, Tensor] = {}
            y: Tensor = mixer(x, None, *shared, **({"losses": own} if mixer.auxiliary else {}))
            refuse_other_losses(mixer, own)
            found.update({f"{name} of layer {i}": value for name, value in own.items()})
            return y

        self._chain(x_BTD, run)
        return found

    def init_cache(self, batch: int, max_length: int) -> list[Cache]:
        """Return the empty decoding state of every layer."""
        return [empty_cache(mixer, batch, max_length) for mixer in self.mixers]

    def step(self, x_B1D: Tensor, caches: list[Cache]) -> Tensor:
        """Mix the next token."""
        y = self._chain(x_B1D, lambda mixer, i, x, *shared: step_rows(mixer, x, caches[i], *shared))
        found = y.shape if isinstance(y, Tensor) else None
        if found != x_B1D.shape:
            cls, wanted = type(self.mixers[-1]), list(x_B1D.shape)
            given = type(y).__name__ if found is None else list(found)
            where = f"{cls.__name__} ({source_location(cls.step)})"
            raise ConfigError(f"step of mixer {where} must return [B, 1, D] like its input, {wanted}, not {given}.")
        return y

    def prefill(self, x_BTD: Tensor, caches: list[Cache]) -> Tensor:
        """Mix a prompt."""
        return self._chain(x_BTD, lambda mixer, i, x, *shared: mixer.prefill(x, caches[i], *shared))

    def _chain(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        shared: dict[str, Tensor] = {}
        for i, mixer in enumerate(self.mixers):
            y = run(mixer, i, x, *((shared,) if mixer.takes_shared else ()))
            x = x + y if i + 1 < len(self.mixers) else x
        return y


class Harness:
    """A mixer in float64 with random parameters, an input, its output, and the tolerances.

    With `last` the mixer is the last layer and the input has one row, to test behaviour that depends on the index.
    """

    def __init__(
        self,
        choice: LayerChoice,
        subject: str,
        hidden: int,
        length: int,
        device: torch.device,
        options: Mapping[str, Any],
        last: bool = False,
    ):
        self.choice, self.subject, self.hidden, self.length, self.device = choice, subject, hidden, length, device
        self.batch = 1 if last else BATCH
        self.config = choice.configure(hidden, {**tiny_options(choice, hidden), **options})
        layers = Layers(choice, self.config, hidden, length, last)
        own = [declared_recipe(mixer) for mixer in layers.mixers]
        recipes = {f"mixers.{i}.{name}": recipe for i, found in enumerate(own) for name, recipe in found.items()}
        initialise(layers, recipes, SEED)
        make_generic(layers)
        self.layers = layers.to(device, torch.float64)
        self.x = self.random("x", self.batch, length, hidden)
        self.weight = self.random("weight", self.batch, length, hidden)
        given = self.x.clone()
        with torch.no_grad():
            self.y = self.layers(given)
        self.wrote = not torch.equal(given, self.x)

    @cached_property
    @torch.no_grad()
    def allowed(self) -> float:
        """The excusable error of an output in float64."""
        moved = self.moved(self.layers, self.x, torch.float64)
        return self.slack(torch.float64) * max(roundoff(torch.float64), largest(moved, self.y))

    def slack(self, dtype: torch.dtype) -> float:
        """Return how many times the effect of one rounding is excusable."""
        return 4.0 if dtype.itemsize == 2 else math.sqrt(self.batch * self.length)

    def random(self, name: str, *shape: int) -> Tensor:
        """Return standard normal float64 values that depend on `name`."""
        drawn = torch.randn(shape, dtype=torch.float64, generator=generator_for(SEED, name))
        return drawn.to(self.device)

    def moved(self, layers: nn.Module, x: Tensor, dtype: torch.dtype, segments: Tensor | None = None) -> Tensor:
        """Return the output after parameters and input moved by the unit roundoff of `dtype`."""
        given = (self.move("x", x, dtype), segments)
        return torch.func.functional_call(layers, self.moved_parameters(layers, dtype), given)

    def moved_parameters(self, layers: nn.Module, dtype: torch.dtype, draw: str = "") -> dict[str, Tensor]:
        """Return the parameters moved by the unit roundoff of `dtype`, each element up or down, as `draw` has it."""
        return {name: self.move(name + draw, p.detach(), dtype) for name, p in layers.named_parameters()}

    def move(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `value` with each element up or down by the unit roundoff of `dtype`."""
        signs = self.random(f"move {name}", *value.shape).sign()
        return value * (1 + roundoff(dtype) * signs)

    def same(self, name: str, actual: Tensor, expected: Tensor, broken: str) -> Check:
        """Return the check that two float64 results [B, T, D] are one, to the excusable error."""
        error = largest(actual, expected, scale=self.y)
        if actual.shape != expected.shape:
            broken += f": one is {list(actual.shape)}, the other {list(expected.shape)}"
        elif error > self.allowed:
            broken += f", first at position {self.first_apart(actual, expected)}"
        return self.check(name, error, self.allowed, broken)

    def first_apart(self, actual: Tensor, expected: Tensor) -> int:
        """Return the first position at which two results [B, T, D] differ by more than the excusable error."""
        apart = (actual - expected).abs().amax((0, 2)) > self.allowed * root_mean_square(self.y)
        return int(apart.nonzero()[0].item())

    def check_zero(self, name: str, moved: Tensor, size: float, broken: str) -> Check:
        """Return the check that `moved` [B, T, D], float64, is zero to the excusable error, as a share of `size`."""
        error = (moved.abs().max() / size).item()
        if error > self.allowed:
            places = (moved.abs().amax((0, 2)) > self.allowed * size).nonzero()
            broken += f", first at position {places[0].item()}"
        return self.check(name, error, self.allowed, broken)

    def check(self, name: str, error: float, allowed: float, broken: str) -> Check:
        """Return a check; `broken` says what is wrong if the error is too large."""
        return judge(self.subject, name, error, allowed, broken)

    def place(self, method: str) -> str:
        """Return the name of a method of the mixer, with file:line for messages."""
        function = inspect.unwrap(getattr(self.choice.mixer, method))
        try:
            return f"{method} ({Path(source_location(function)).name})"
        except OSError:  # a class defined without a file, such as in an interactive session
            return method

    def own_name(self, parameter: str) -> str:
        """Return the name of a parameter of `layers` in the mixer."""
        return parameter.removeprefix("mixers.0.") if len(self.layers.mixers) == 1 else parameter

    def segments(self) -> Tensor:
        """Return [2, T] ids with boundaries off every grid, segments of one token and a padding segment at the end."""
        T = self.length
        rows = []
        for cuts in ([1, 6, T // 3, 2 * T // 3 + 1], [T // 5, T // 5 + 1, T // 5 + 2, T - 3]):
            marks = torch.zeros(T, dtype=torch.int64)
            marks[cuts] = torch.tensor([1, 1, 3, 4])
            rows.append(marks.cumsum(0))
        return torch.stack(rows).to(self.device)


def judge(subject: str, name: str, error: float, allowed: float, broken: str) -> Check:
    """Return a check; `broken` says what is wrong if the error is too large. With `allowed` 0 it is a yes or no."""
    broken += ": the compared values contain NaN" if math.isnan(error) else ""
    return Check(subject=subject, name=name, error=error, allowed=allowed, broken=broken)


def attempt(subject: str, cls: type[Mixer], prove: Callable[[], Iterable[Check]], name: str) -> Iterator[Check]:
    """Yield the checks of one proof up to the first that fails; if the proof raises, one that failed and says where.

    One mistake breaks most checks of a proof, so the others would only repeat the message.
    """
    try:
        for check in prove():
            yield check
            if not check.passed:
                return
    except (Exception, SystemExit) as error:  # whatever the author's code raises
        yield raised(subject, cls, name, error)


def raised(subject: str, cls: type[Mixer], name: str, error: BaseException) -> Check:
    """Return the failed check `name` that raised `error`, with the line of the file of `cls` where it did."""
    broken = f"failed: {str(error).rstrip('.?')}"
    if not isinstance(error, BasecapError):  # those are sentences for people
        place = Path(error_location(error, cls) or source_location(cls)).name
        broken = f"raised {describe_error(error)} ({place}{_given(error)}){_on_dtypes(error)}"
    return Check(subject=subject, name=name, error=None, allowed=None, broken=broken)


def _given(error: BaseException) -> str:
    """Return the shape of the input of the mixer that raised `error`, "" when none was running."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is Layers._chain.__code__]
    return f", for x {list(frames[-1].f_locals['x'].shape)}" if frames else ""


def _on_dtypes(error: BaseException) -> str:
    """Return advice for an error that mixes float64, the dtype of the suite, with float32; "" for any other error."""
    words = str(error).lower()
    if not (isinstance(error, RuntimeError) and "double" in words and "float" in words.replace("float64", "")):
        return ""
    return (
        "; basecap check runs in float64: create tensors with dtype=x.dtype, keep layers in an nn.ModuleList, not a "
        "list, and use x.to(torch.promote_types(x.dtype, torch.float32)) instead of x.float()"
    )


def empty_cache(mixer: Mixer, batch: int, max_length: int) -> Cache:
    """Return `mixer.init_cache(batch, max_length)`; raises ConfigError unless that is a Cache of tensors."""
    cache: object = mixer.init_cache(batch, max_length)
    if not isinstance(cache, Cache):
        found = type(cache).__name__
    elif strange := [key for key, value in cache.tensors.items() if not isinstance(value, Tensor)]:
        found = f"one whose {strange[0]!r} is {type(cache.tensors[strange[0]]).__name__}"
    else:
        return cache
    where = f"{type(mixer).__name__} ({source_location(type(mixer))})"
    raise ConfigError(f"init_cache of {where} must return Cache(tensors={{name: tensor}}), not {found}.")


def tiny_options(choice: LayerChoice, hidden: int) -> dict[str, Any]:
    """Return the options of `Mixer.tiny` that apply to `choice`: those it has, lengths only where they are set."""
    config = choice.configure(hidden, {})
    known = type(config).model_fields
    return {
        key: value
        for key, value in choice.mixer.tiny.items()
        if key in known and (key == "heads" or getattr(config, key) is not None)
    }


def largest(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest absolute difference over the root mean square of `scale` (else of `expected`)."""
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    size = root_mean_square(expected if scale is None else scale)
    return ((actual.double() - expected.double()).abs().max() / size).item()


def root_mean_square(x: Tensor) -> float:
    """Return the root mean square in float64."""
    return x.double().square().mean().sqrt().item()


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2

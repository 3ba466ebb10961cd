"""A family of published models: which model of basecap its configuration describes, and where each weight goes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.models import ModelConfig
from basecap.registry import Registry


@dataclass(frozen=True)
class WeightRow:
    """One of our parameters: its name, the published weights it is made of, and how.

    Attributes:
        ours: name in `LanguageModel.named_parameters`.
        theirs: names in the published files.
        layout: takes these weights in order and returns ours.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Callable[..., Tensor]


class ModelFile:
    """The config.json of a published model, whose values must be ones that basecap has."""

    def __init__(self, values: Mapping[str, Any]):
        """Take the content of config.json."""
        self.values = values
        self.kind = str(values.get("model_type"))

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number; raises ConfigError for anything else."""
        found = self.values.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ConfigError(f"config.json has {key} = {found!r}; give a folder where it is a positive whole number.")
        return found

    def number(self, key: str, default: float) -> float:
        """Return a number; raises ConfigError for anything else."""
        return self._number(key, self.values.get(key, default))

    def _number(self, key: str, found: object) -> float:
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise ConfigError(f"config.json has {key} = {found!r}; give a folder where it is a number.")
        return float(found)

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Raise ConfigError unless each key that is given has the wanted value, which is also its default."""
        for key, value in wanted.items():
            found = self.values.get(key)
            if found is not None and found != value:
                raise ConfigError(
                    f"this {self.kind} has {key} = {found!r}, and basecap has such models with {value!r} only; import "
                    "another one."
                )

    def rotary(self, fraction: float = 1.0) -> tuple[float, float]:
        """Return base and rotated share of RoPE; raises ConfigError for scaled positions."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"config.json has positions {given!r}; give a folder where they are a section.")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"this {self.kind} scales its positions ({kind}), and basecap does not; import another.")
        base = given.get("rope_theta", self.values.get("rope_theta", self.values.get("rotary_emb_base", 10_000.0)))
        share = given.get("partial_rotary_factor", self.values.get("rotary_pct", fraction))
        return self._number("rope_theta", base), self._number("partial_rotary_factor", share)


class Family(ABC):
    """A family of published models."""

    #: Endings of names in the files that are no weights, or repeat one.
    ignored: ClassVar[tuple[str, ...]] = ()
    #: Beginnings of names of other parts than the language model, such as what reads pictures.
    other_parts: ClassVar[tuple[str, ...]] = ()
    #: Names that some files have for the names in `rows`.
    renamed: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def model(self, published: ModelFile) -> ModelConfig:
        """Return the model of basecap that a configuration describes; raises ConfigError where there is none."""

    @abstractmethod
    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield a row for each of our parameters."""


FAMILIES: Registry[Family] = Registry("model_type", "basecap.families")


def family(*model_types: str) -> Callable[[type[Family]], type[Family]]:
    """Decorator: register a family under the values of `model_type` in its config.json."""

    def register(cls: type[Family]) -> type[Family]:
        for name in model_types:
            FAMILIES.add(name, cls(), cls)
        return cls

    return register


def same(ours: str, theirs: str) -> WeightRow:
    """Return the row of a parameter that is the published weight itself."""
    return WeightRow(ours, (theirs,), _first)


def joined(ours: str, *theirs: str) -> WeightRow:
    """Return the row of a parameter that has several published weights below each other."""
    return WeightRow(ours, theirs, _below)


def _first(weight: Tensor) -> Tensor:
    return weight


def _below(*weights: Tensor) -> Tensor:
    return torch.cat(weights)


def ends(model: ModelConfig, embedding: str, norm: str, head: str) -> Iterator[WeightRow]:
    """Yield the rows of the embedding, the last norm's gain, and the head where it is not tied."""
    yield same("embedding.weight", embedding)
    yield same("norm.weight", norm)
    if not model.tied:
        yield same("head.weight", head)

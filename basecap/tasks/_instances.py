"""Examples of a task as arrays, and how predictions are scored against them."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from basecap.tasks._draws import Ints

#: The target where nothing is asked, and the number of the pair or group where there is none.
NOTHING = -1


class Role(IntEnum):
    """What a token of an input is there for."""

    FILLER = 0
    KEY = 1
    VALUE = 2
    QUERY = 3
    SEPARATOR = 4
    MASK = 5
    NOISE = 6


@dataclass(frozen=True, kw_only=True)
class Instances:
    """N examples of T positions.

    Attributes:
        inputs: int64 [N, T], the tokens that a model reads.
        targets: int64 [N, T], the token it has to give at a position, after reading that position too; -1: none.
        roles: int8 [N, T], values of `Role`.
        pairs: int32 [N, T], the number of the key-value pair that a token belongs to, queries included; -1: none.
        groups: int32 [N, T], the number of the queried value that a target is part of; -1: no target, or one that is
            trained but not scored, such as a closing separator.
        choices: int64 [N, G, R], the right tokens of group g, one per region r; None where only the target is right.
    """

    inputs: Ints
    targets: Ints
    roles: NDArray[np.int8]
    pairs: NDArray[np.int32]
    groups: NDArray[np.int32]
    choices: Ints | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def right(self, predictions: Ints) -> NDArray[np.bool_]:
        """Return [N, T]: whether a prediction [N, T] is a right answer to a target that is scored."""
        return self.region(predictions) != NOTHING

    def region(self, predictions: Ints) -> Ints:
        """Return [N, T]: the region whose value a prediction [N, T] gives, 0 for all without `choices`; -1: wrong."""
        asked = self.groups != NOTHING
        if self.choices is None:
            return np.where(asked & (predictions == self.targets), 0, NOTHING)
        right = np.take_along_axis(self.choices, np.maximum(self.groups, 0)[:, :, None].astype(np.int64), axis=1)
        given = right == predictions[:, :, None]
        return np.where(asked & given.any(axis=2), given.argmax(axis=2), NOTHING)

    def score(self, predictions: Ints) -> tuple[Ints, Ints]:
        """Return how many queried values each example has wholly right, and how many it asks for: int64 [N] each.

        Pair accuracy is the mean of their ratio or the ratio of their sums; an example counts as a whole case where
        they are equal.
        """
        count = int(self.groups.max(initial=NOTHING)) + 1
        rows, places = np.nonzero(self.groups != NOTHING)
        numbers = rows * count + self.groups[rows, places]
        wrong = ~self.right(predictions)[rows, places]
        asked = np.bincount(numbers, minlength=len(self) * count) > 0
        failed = np.bincount(numbers, weights=wrong, minlength=len(self) * count) > 0
        return (asked & ~failed).reshape(len(self), count).sum(axis=1), asked.reshape(len(self), count).sum(axis=1)


class Canvas:
    """Where a task writes its examples: the arrays of `Instances`, empty at first."""

    def __init__(self, instances: Instances):
        """Take arrays of `Instances` to overwrite; nothing else holds them."""
        self.made = instances
        self.inputs = instances.inputs
        instances.targets.fill(NOTHING)
        instances.roles.fill(Role.FILLER)
        instances.pairs.fill(NOTHING)
        instances.groups.fill(NOTHING)
        self._rows = np.arange(len(instances))[:, None]

    def write(self, places: Ints, tokens: Ints | int, role: Role, pairs: Ints | int = NOTHING) -> None:
        """Write tokens at places [N, P]; `tokens` and `pairs` broadcast to them."""
        self.inputs[self._rows, places] = tokens
        self.made.roles[self._rows, places] = role
        self.made.pairs[self._rows, places] = pairs

    def ask(self, places: Ints, tokens: Ints | int, groups: Ints | int) -> None:
        """Make tokens the targets at places [N, P]; `tokens` and `groups` broadcast to them."""
        self.made.targets[self._rows, places] = tokens
        self.made.groups[self._rows, places] = groups

    def choose(self, tokens: Ints) -> None:
        """Make tokens [N, G, R] the right answers of every group, one per region."""
        assert self.made.choices is not None
        self.made.choices[:] = tokens

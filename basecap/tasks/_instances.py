"""Examples of a task as arrays, and the scoring of predictions."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from basecap.tasks._draws import Ints

#: Target of positions without one, and number of the pair or group of tokens without one.
NOTHING = -1


class Role(IntEnum):
    """The role of a token of an input."""

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
        inputs: int64 [N, T], the input tokens.
        targets: int64 [N, T], the token to predict after reading each position, -1 for none.
        roles: int8 [N, T], values of `Role`.
        pairs: int32 [N, T], number of the key-value pair of each token, also of queries, -1 for none.
        groups: int32 [N, T], number of the queried value that a target belongs to, -1 for positions without a target
            and for targets that are trained but not scored, such as a closing separator.
        choices: int64 [N, G, R], the right tokens of group g, one per region r; None if only the target is right.
    """

    inputs: Ints
    targets: Ints
    roles: NDArray[np.int8]
    pairs: NDArray[np.int32]
    groups: NDArray[np.int32]
    choices: Ints | None = None

    @classmethod
    def empty(cls, count: int, length: int, choices: tuple[int, int] | None = None) -> "Instances":
        """Return uninitialised arrays of `count` examples of `length` tokens, with `choices` groups and regions."""
        shape = (count, length)
        return cls(
            inputs=np.empty(shape, dtype=np.int64),
            targets=np.empty(shape, dtype=np.int64),
            roles=np.empty(shape, dtype=np.int8),
            pairs=np.empty(shape, dtype=np.int32),
            groups=np.empty(shape, dtype=np.int32),
            choices=None if choices is None else np.empty((count, *choices), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, part: slice) -> "Instances":
        """Return some of the examples, as views of their arrays."""
        arrays: dict[str, Any] = {name: None if array is None else array[part] for name, array in vars(self).items()}
        return Instances(**arrays)

    def right(self, predictions: Ints) -> NDArray[np.bool_]:
        """Return [N, T]: whether a prediction [N, T] is a right answer at a scored position."""
        return self.region(predictions) != NOTHING

    def region(self, predictions: Ints) -> Ints:
        """Return [N, T]: the region whose value a prediction [N, T] equals (0 without `choices`), -1 if it is wrong."""
        asked = self.groups != NOTHING
        if self.choices is None:
            return np.where(asked & (predictions == self.targets), 0, NOTHING)
        right = np.take_along_axis(self.choices, np.maximum(self.groups, 0)[:, :, None].astype(np.int64), axis=1)
        given = right == predictions[:, :, None]
        return np.where(asked & given.any(axis=2), given.argmax(axis=2), NOTHING)

    def score(self, predictions: Ints) -> tuple[Ints, Ints]:
        """Return the number of queried values with all tokens right, and of all queried values: int64 [N] each.

        Accuracy is the ratio of their sums; case accuracy is the share of examples where they are equal.
        """
        count = int(self.groups.max(initial=NOTHING)) + 1
        rows, places = np.nonzero(self.groups != NOTHING)
        numbers = rows * count + self.groups[rows, places]
        wrong = ~self.right(predictions)[rows, places]
        asked = np.bincount(numbers, minlength=len(self) * count) > 0
        failed = np.bincount(numbers, weights=wrong, minlength=len(self) * count) > 0
        return (asked & ~failed).reshape(len(self), count).sum(axis=1), asked.reshape(len(self), count).sum(axis=1)


class Canvas:
    """The arrays of `Instances`, into which a task writes its examples."""

    def __init__(self, instances: Instances):
        """Take the arrays to overwrite."""
        self.made = instances
        self.inputs = instances.inputs
        instances.targets.fill(NOTHING)
        instances.roles.fill(Role.FILLER)
        instances.pairs.fill(NOTHING)
        instances.groups.fill(NOTHING)
        self._rows = np.arange(len(instances))[:, None]

    def write(self, places: Ints, tokens: Ints | int, role: Role, pairs: Ints | int = NOTHING) -> None:
        """Write tokens at `places` [N, P]; `tokens` and `pairs` are broadcast."""
        self.inputs[self._rows, places] = tokens
        self.made.roles[self._rows, places] = role
        self.made.pairs[self._rows, places] = pairs

    def ask(self, places: Ints, tokens: Ints | int, groups: Ints | int) -> None:
        """Set the targets at `places` [N, P]; `tokens` and `groups` are broadcast."""
        self.made.targets[self._rows, places] = tokens
        self.made.groups[self._rows, places] = groups

    def choose(self, tokens: Ints) -> None:
        """Set the right answers of every group, one per region: int64 [N, G, R]."""
        assert self.made.choices is not None
        self.made.choices[:] = tokens

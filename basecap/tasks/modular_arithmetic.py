"""Modular arithmetic: expressions in prefix notation, answered without steps in between.

The task Mano of "Physics of Language Models", part 4.1 (SSRN 5240330): sums, differences and products of numbers modulo
23. Its expressions have 1 to L operations; here a cell has one number of operations, shapes of expressions are drawn
uniformly, and an example holds as many expressions as fit. Both modes are the same.
"""

import numpy as np
from pydantic import Field

from basecap.errors import ConfigError
from basecap.tasks._contract import Answers, Cell, Task, TaskConfig, task
from basecap.tasks._draws import ExampleDraws, Ints
from basecap.tasks._instances import Canvas, Role

#: In the order of their tokens, after the numbers.
OPERATIONS = (np.add, np.subtract, np.multiply)


class ModularArithmeticConfig(TaskConfig):
    """Options of modular arithmetic."""

    length: int = Field(64, ge=4, le=2**20, description="tokens of an example")
    operations: int = Field(3, ge=1, le=2**10, description="operations in an expression")
    modulus: int = Field(23, ge=2, le=2**15, description="numbers are 0 to modulus - 1")


@task(
    "modular-arithmetic",
    source='"Physics of Language Models", part 4.1 (SSRN 5240330)',
    summary="the value of an expression in prefix notation, modulo 23",
)
class ModularArithmetic(Task):
    """Blanks, then expressions, each followed by a mark where its value is the target."""

    Config = ModularArithmeticConfig
    axes = ("length", "operations")

    @property
    def vocabulary(self) -> int:
        """Numbers, operations, mark and blank."""
        return int(self.config.modulus) + len(OPERATIONS) + 2

    @property
    def _width(self) -> int:
        return 2 * int(self.config.operations) + 2

    def check(self) -> None:
        """Raise ConfigError if no expression fits into the length."""
        c = self.config
        if c.length < self._width:
            raise ConfigError(
                f"an expression of {c.operations} operations and its mark do not fit into length {c.length}; "
                f"set length to {self._width} or more."
            )

    def grid(self) -> tuple[Cell, ...]:
        """Return 1 to 16 operations; the paper trains with at most 10, 13 and 16."""
        return tuple({"length": 64, "operations": count} for count in (1, 2, 4, 8, 16))

    def make(self, draws: ExampleDraws, canvas: Canvas) -> None:
        """Write the examples of `draws`."""
        c, width = self.config, self._width
        count = c.length // width
        canvas.inputs.fill(self.vocabulary - 1)
        for number in range(count):
            tokens = self._expressions(draws, number)
            first = c.length - (count - number) * width
            places = first + np.arange(width - 1)[None]
            canvas.write(places, tokens, Role.VALUE, number)
            mark = np.array([[first + width - 1]])
            canvas.write(mark, self.vocabulary - 2, Role.QUERY, number)
            canvas.ask(mark, self._values(tokens), number)

    def _expressions(self, draws: ExampleDraws, number: int) -> Ints:
        """Return random expressions, int64 [N, 2 operations + 1].

        One rotation of any order of n operations and n + 1 numbers is an expression: the one that begins where the
        running sum, +1 for an operation and -1 for a number, is first at its minimum (Dvoretzky and Motzkin, 1947).
        """
        c, size = self.config, 2 * self.config.operations + 1
        is_number = np.ones((draws.size, size), dtype=bool)
        np.put_along_axis(is_number, draws.slots(f"shape {number}", c.operations, size), False, axis=1)
        begin = np.where(is_number, -1, 1).cumsum(axis=1).argmin(axis=1)[:, None] + 1
        is_number = np.take_along_axis(is_number, (begin + np.arange(size)) % size, axis=1)
        numbers = draws.below(f"numbers {number}", size, c.modulus)
        operations = c.modulus + draws.below(f"operations {number}", size, len(OPERATIONS))
        return np.where(is_number, numbers, operations)

    def _values(self, tokens: Ints) -> Ints:
        """Return the values [N, 1], from the last token to the first with a stack."""
        modulus, rows = self.config.modulus, np.arange(len(tokens))
        stack, depth = (
            np.zeros((len(tokens), tokens.shape[1] + 1), dtype=np.int64),
            np.zeros(len(tokens), dtype=np.int64),
        )
        for token in tokens.T[::-1]:
            left, right = stack[rows, depth - 1], stack[rows, depth - 2]
            value = token.copy()
            for code, operation in enumerate(OPERATIONS, start=modulus):
                value = np.where(token == code, operation(left, right) % modulus, value)
            depth = np.where(token < modulus, depth + 1, depth - 1)
            stack[rows, depth - 1] = value
        return stack[:, :1]

    def solve(self, inputs: Ints, asked: Ints) -> Answers:
        """Return the value of the expression that ends before each mark."""
        found: Answers = {}
        for place in asked.tolist():
            value, end = self._value(inputs[place - self._width + 1 : place].tolist(), 0)
            assert end == self._width - 1
            found[place] = frozenset({value})
        return found

    def _value(self, tokens: list[int], start: int) -> tuple[int, int]:
        """Return the value of the expression that begins at `start`, and the position after it."""
        modulus = int(self.config.modulus)
        if tokens[start] < modulus:
            return tokens[start], start + 1
        left, middle = self._value(tokens, start + 1)
        right, end = self._value(tokens, middle)
        results = (left + right, left - right, left * right)
        return results[tokens[start] - modulus] % modulus, end

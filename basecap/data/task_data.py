"""Examples of a task as training batches and tests: a pure function of (seed of the examples, step).

All rows of a step have the same length. An epoch has every example of every cell once: the examples of one length, in a
random order for each pass, fill the steps of that length, and these steps are spread over the epoch at random. If the
examples of a length do not fill whole steps, the last step of a pass already takes examples of the next one, so that
the progress in any two cells never differs by more than a step.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Literal

import numpy as np

from basecap.data.hashes import digest
from basecap.data.task_config import TaskSection
from basecap.data.workload import Batch, Workload, share_of
from basecap.tasks import ExampleDraws, Instances, Ints, Task, key_of

#: Part of the manifest hash; increase it when the order of examples changes.
FORMAT = 1

HeldOut = Literal["validation", "test"]

#: The splits; each has its own seed, derived from the seed of the section.
_SPLITS = ("train", "validation", "test")


class TaskData(Workload):
    """One training task of a study with its validation examples, and the test examples of all tasks.

    Attributes:
        vocabulary: number of token ids of all tasks of the study.
        readout: where they are answered, see `Task.readout`.
        length: tokens of the longest training example.
        task: name of the training task.
        cells: the training task in each of its cells.
        tests: the test tasks in each of their cells, by name.
        facts: whether a task of the study has facts to know.
        longest_test: tokens of the longest test example.
        held_out_examples: validation examples per cell, and as many test examples.
        manifest_hash: hash of everything that the training examples and their order depend on.
    """

    def __init__(self, section: TaskSection, task: str):
        """Take the options of the study and one of its training tasks; generates no examples."""
        self.task = task
        self.cells = section.training(task)
        self.tests = {name: section.tests(name) for name in section.tested_by(task)}
        self.facts = any(cell.facts is not None for cell in section.every())
        self.longest_test = max(cell.length for cells in self.tests.values() for cell in cells)
        self.held_out_examples = section.held_out
        self.vocabulary = section.vocabulary
        self.readout = section.readout
        self.length = max(cell.length for cell in self.cells)
        self._section = section
        self._groups = {
            length: [cell for cell in self.cells if cell.length == length]
            for length in sorted({cell.length for cell in self.cells})
        }
        identities = [cell.identity for cell in self.cells]
        self.manifest_hash = digest([FORMAT, identities, section.examples, section.seed])

    @property
    def shares(self) -> dict[int, float]:
        """Share of the steps by length of their rows."""
        steps = {length: size / (self.length // length) for length, size in self._sizes.items()}
        return {length: count / sum(steps.values()) for length, count in steps.items()}

    def tokens(self, epochs: int, batch: int) -> int:
        """Return the training tokens of `epochs` epochs in steps of `batch` longest examples; at least one step."""
        return max(1, self._first_step(epochs, batch)) * batch * self.length

    def held_out(self, split: HeldOut, cell: Task) -> Instances:
        """Return the validation or test examples of a task in one of its cells."""
        return cell.instances(self._seed(split), range(self.held_out_examples))

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        """Return examples of one length, see `Workload.batch`. They do not depend on `seed`: all runs see the same."""
        import torch  # here, because studies are read and planned without torch

        share_of(batch, world)
        length, first = self._place(step, batch)
        rows = batch * (self.length // length) // world
        start = first + rank * rows
        passes, places = np.divmod(np.arange(start, start + rows), self._sizes[length])
        chosen = np.empty(rows, dtype=np.int64)
        for number in np.unique(passes).tolist():
            key = key_of(self._section.seed, "examples", length, number)
            here = passes == number
            chosen[here] = _permutation(key, self._sizes[length])[places[here]]
        inputs, targets = np.empty((2, rows, length), dtype=np.int64)
        cells, numbers = np.divmod(chosen, self._section.examples)
        for cell, task in enumerate(self._groups[length]):
            here = np.nonzero(cells == cell)[0]
            made = task.instances(self._seed("train"), numbers[here])
            inputs[here], targets[here] = made.inputs, made.targets
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def _seed(self, split: Literal["train", "validation", "test"]) -> int:
        return len(_SPLITS) * self._section.seed + _SPLITS.index(split)

    @property
    def _sizes(self) -> dict[int, int]:
        """Training examples by length."""
        return {length: len(cells) * self._section.examples for length, cells in self._groups.items()}

    def _steps(self, length: int, epochs: int, batch: int) -> int:
        """Return the number of steps of one length in the first `epochs` epochs."""
        return epochs * self._sizes[length] // (batch * (self.length // length))

    def _first_step(self, epoch: int, batch: int) -> int:
        """Return the first step of an epoch."""
        return sum(self._steps(length, epoch, batch) for length in self._groups)

    def _place(self, step: int, batch: int) -> tuple[int, int]:
        """Return the length of a step's rows, and the number of earlier rows of that length."""
        per_epoch = sum(size / (batch * (self.length // length)) for length, size in self._sizes.items())
        beyond = int((step + len(self._groups)) / per_epoch) + 2
        epoch = bisect_right(range(beyond), step, key=lambda number: self._first_step(number, batch)) - 1
        before = {length: self._steps(length, epoch, batch) for length in self._groups}
        counts = {length: self._steps(length, epoch + 1, batch) - before[length] for length in self._groups}
        lengths = np.repeat(list(counts), list(counts.values()))
        lengths = lengths[_permutation(key_of(self._section.seed, "lengths", epoch), len(lengths))]
        index = step - sum(before.values())
        length = int(lengths[index])
        earlier = before[length] + int(np.count_nonzero(lengths[:index] == length))
        return length, earlier * batch * (self.length // length)


@lru_cache(maxsize=16)
def _permutation(key: int, size: int) -> Ints:
    """Return a permutation of range(size) that depends on the key."""
    return np.argsort(ExampleDraws(key, np.arange(size)).bits("order", 1)[:, 0], kind="stable")

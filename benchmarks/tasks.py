"""Time what making 20,000 examples of about 512 tokens takes on one core, for every task in its densest cell.

Run `OMP_NUM_THREADS=1 python benchmarks/tasks.py`. A task is timed only when its solver agrees with some of its
examples; the exit code is 1 when one does not, or takes longer than the limit.
"""

import sys
import time

from basecap.tasks import TASKS, Task, asked, build_task

EXAMPLES, LENGTH, LIMIT = 20_000, 512, 2.0


def densest(task: Task) -> Task:
    """Return the task at length 512, with the most pairs or tokens among the published cells that fit."""
    cells = [cell for cell in task.grid() if cell["length"] == LENGTH]
    filling = next((axis for axis in ("pairs", "tokens") if axis in task.axes), None)
    most = max((cell[filling] for cell in cells), default=None) if filling else None
    return task.at({"length": LENGTH, **({} if most is None else {filling: most})})


def agrees(task: Task) -> bool:
    """Whether the solver finds the targets of a few examples among its answers."""
    found = task.instances(1, range(3))
    return all(
        int(found.targets[row, place]) in right
        for row in range(3)
        for place, right in task.solve(found.inputs[row], asked(found, row)).items()
    )


def seconds(task: Task) -> float:
    """Return processor seconds of the fastest of three rounds."""
    rounds = []
    for seed in range(3):
        start = time.process_time()
        task.instances(seed, range(EXAMPLES))
        rounds.append(time.process_time() - start)
    return min(rounds)


def main() -> int:
    """Print a line per task and mode; return the exit code."""
    slow = 0
    print(f"{EXAMPLES:,} examples, one core; limit {LIMIT} s")
    for name in TASKS.names():
        for mode in ("clean", "paper"):
            task = densest(build_task(name, {"mode": mode}))
            taken = seconds(task) if agrees(task) else float("nan")
            slow += not taken <= LIMIT
            cell = ", ".join(f"{axis} {value}" for axis, value in task.cell.items())
            rate = EXAMPLES * task.length / taken / 1e6
            print(f"{name:26} {mode:6} {taken:5.2f} s {rate:6.1f}M tokens/s  {cell}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())

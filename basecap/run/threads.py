"""How many threads of the CPU a run trains with: measured in its trial, kept with the study, the same when it resumes.

Threads of a small operation wait for each other longer than they compute, above all beside other programs: two of them
can be ten times slower than one. Another number of threads adds up in another order, so numbers differ by rounding.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from basecap.errors import ConfigError
from basecap.plan.runs import RunSpec
from basecap.records import RUN_THREADS, StudyRecords
from basecap.system import environment

#: How many times as fast several threads must be, so that noise does not choose them.
GAIN = 1.1
#: Steps that are timed with each number of threads at most, and seconds after which no further ones begin.
ROUNDS, SECONDS = 6, 1.0
#: How many architectures a sentence names.
LISTED = 4


def step_seconds(step: Callable[[], object], device: torch.device) -> dict[int, float]:
    """Return the seconds of a training step by its threads: of one and of as many as this process has.

    They take turns. The first step of each, which warms up, counts only if it stays the only one.
    Empty on a GPU and with a single thread.
    """
    most = environment.most_threads()
    if device.type != "cpu" or most == 1:
        return {}
    taken: dict[int, list[float]] = {1: [], most: []}
    began = time.perf_counter()
    while len(taken[1]) < ROUNDS and (not taken[1] or time.perf_counter() - began < SECONDS):
        for count, seconds in taken.items():
            with using(count):
                since = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - since)
    return {count: sum(seconds[1:] or seconds) / len(seconds[1:] or seconds) for count, seconds in taken.items()}


def faster(seconds: Mapping[int, float]) -> int:
    """Return the number of threads to train with, one unless several are clearly faster.

    >>> faster({1: 0.2, 8: 0.1}), faster({1: 0.1, 8: 0.095}), faster({})
    (8, 1, 1)
    """
    several = max(seconds, default=1)
    return several if several > 1 and GAIN * seconds[several] < seconds[1] else 1


def refuse(count: int | None, device: torch.device) -> None:
    """Raise ConfigError for a number of threads where runs are on a GPU, which one thread of the CPU serves."""
    if count is not None and device.type != "cpu":
        raise ConfigError(f"--threads is for runs on a CPU, and these run on {device}; leave it out.")


@contextlib.contextmanager
def using(count: int | None) -> Iterator[None]:
    """Compute with `count` threads in a block; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def recorded(run: RunSpec, records: StudyRecords, device: torch.device) -> Iterator[int | None]:
    """Compute on a CPU with the threads that the study has for a run, and yield them; None before they are chosen."""
    count = records.run_threads().get(run.architecture) if device.type == "cpu" else None
    with using(count):
        yield count


def record_choice(
    measured: Mapping[str, Mapping[int, float]], records: StudyRecords, log: Callable[[str], None]
) -> None:
    """Record the faster number of threads for each architecture that lacks one, and log what was measured.

    Args:
        measured: what `step_seconds` found by architecture.
        records: of the study.
        log: takes sentences for the terminal.
    """
    with records.locked():  # another command may have chosen meanwhile
        held = records.run_threads()
        _write({name: held.get(name, faster(seconds)) for name, seconds in measured.items()}, records)
    for sentence in _sentences({name: seconds for name, seconds in measured.items() if seconds}):
        log(sentence)


def record(chosen: Mapping[str, int], records: StudyRecords) -> None:
    """Record the threads of architectures in place of those that they have."""
    with records.locked():
        _write(chosen, records)


def _write(chosen: Mapping[str, int], records: StudyRecords) -> None:
    if chosen:
        records.write_environment({**records.environment(), RUN_THREADS: records.run_threads() | dict(chosen)})


def _sentences(measured: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Yield a sentence for each number of threads that was chosen, with the times of the steps.

    >>> next(_sentences({"a": {1: 0.02, 8: 0.035}, "b": {1: 0.2, 8: 0.1}, "c": {1: 0.3, 8: 0.1}}))
    'CPU threads: 1 for a; a step takes 20 ms with 1 and 35 ms with 8.'
    """
    for count in sorted({faster(seconds) for seconds in measured.values()}):
        names = [name for name, seconds in measured.items() if faster(seconds) == count]
        own = [measured[name] for name in names]
        times = " and ".join(f"{_span([seconds[n] for seconds in own])} with {n}" for n in own[0])
        whose = ", ".join(names) if len(names) <= LISTED else f"{len(names)} architectures"
        yield f"CPU threads: {count} for {whose}; a step takes {times}."


def _span(seconds: Sequence[float]) -> str:
    least, most = (float(f"{1000 * value:.3g}") for value in (min(seconds), max(seconds)))
    return f"{least:,g} ms" if least == most else f"{least:,g} to {most:,g} ms"

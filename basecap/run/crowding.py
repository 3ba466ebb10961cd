"""Jobs that found too little memory beside others: every executor starts them again, where they have more of it."""

from collections.abc import Callable, Mapping, Sequence

from basecap.plan.runs import RunSpec
from basecap.records import RunInfo
from basecap.run.evaluation_job import StoredPoint
from basecap.run.jobs import JobFailure, Trial, lacks_memory, lacks_memory_of_machine
from basecap.system.processes import Shared

#: What a job returns: what a trial found, the info of a run (None: another command trains it), the evaluations that
#: failed at a point or at each of several.
Result = Trial | RunInfo | Mapping[str, JobFailure] | Sequence[Mapping[str, JobFailure]] | None


def failures(result: Result) -> list[str]:
    """Return the messages of what failed in a job.

    >>> failures([{}, {"copying": JobFailure(message="out of memory")}]), failures(None)
    (['out of memory'], [])
    """
    if isinstance(result, Trial):
        return [] if result.failure is None else [result.failure.message]
    if isinstance(result, RunInfo):
        return [result.message] if result.status == "failed" else []
    if isinstance(result, Mapping):
        return [failure.message for failure in result.values()]
    return [message for part in result or () for message in failures(part)]


def memory_of(messages: Sequence[str]) -> Shared:
    """Return whose memory a failed job lacks that shares its device, "place", and the machine with others.

    >>> memory_of(["OutOfMemoryError: CUDA out of memory."]), memory_of(["MemoryError: no room"])
    ('place', 'machine')
    """
    return "machine" if any(map(lacks_memory_of_machine, messages)) else "place"


def starts_again(what: str, messages: Sequence[str], when: str, log: Callable[[str], None]) -> bool:
    """Whether a job that ran beside others starts again, as it found too little memory; log that.

    Args:
        what: names the job.
        messages: of what failed in it.
        when: it starts again.
        log: takes the sentence.
    """
    message = next((message for message in messages if lacks_memory(message)), None)
    if message is not None:
        why = "was killed, possibly out of memory," if "was killed" in message else "found too little memory"
        log(f"{what} {why} beside others; it starts again {when}.")
    return message is not None


def trial_of(run: RunSpec) -> str:
    """Return what messages call the trial of a run."""
    return f"{run.architecture}: its trial step"


def evaluation_of(point: StoredPoint) -> str:
    """Return what messages call the evaluation of a point."""
    return f"{point.run.label}: its evaluation at step {point.step}"

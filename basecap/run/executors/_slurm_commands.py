"""The commands of Slurm that an executor uses: sbatch, squeue, scancel, scontrol; it needs no accounting database."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from basecap.errors import ConfigError

#: Options of sbatch that the executor sets itself.
OWN = ("array", "chdir", "error", "job-name", "output", "parsable", "wait", "wrap")
#: The setting that is none of sbatch: how many jobs prepare the text, and the options that these leave out.
PREPARE, GPUS = "prepare", ("gpus-per-node", "gpus", "gpus-per-task", "gres")
#: What Slurm says when it takes no more jobs for now.
FULL = ("temporarily unable to accept", "Resource temporarily unavailable", "SubmitJob", "job limit", "exceeded limit")
#: Seconds that a command of Slurm may take.
PATIENCE = 60.0
#: Signal before the time limit, and how many seconds before it: a checkpoint takes some.
SIGNAL = "B:TERM@120"


class QueueFull(Exception):
    """Slurm takes no more jobs for now."""


@dataclass(frozen=True, kw_only=True)
class QueuedTask:
    """A task of an array of jobs that Slurm has not ended."""

    job: str
    index: int
    state: str
    reason: str
    id: str

    @property
    def place(self) -> tuple[str, int]:
        """The name of its job and its index."""
        return self.job, self.index


def refuse_missing() -> None:
    """Raise ConfigError where this machine has no Slurm, or none that answers."""
    missing = [name for name in ("sbatch", "squeue", "scancel", "scontrol") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"executor slurm finds no {missing[0]} on the path; run the command where Slurm is installed, such as a "
            "login node."
        )
    try:
        asked = _run(["squeue", "--me", "--noheader"])
        reason = _sentence(asked.stderr.splitlines()) if asked.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"squeue took more than {PATIENCE:.0f} s"
    if reason:
        raise ConfigError(f"Slurm does not answer ({reason}); run `scontrol ping` to see whether its controller does.")


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise ConfigError for settings that do not fit: a run uses one node."""
    for name, value in settings.items():
        if name == PREPARE and not re.fullmatch(r"[1-9]\d{0,3}", value):
            raise ConfigError(f"--slurm: prepare={value} is no number of jobs; write it as prepare=4.")
        if name in OWN:
            raise ConfigError(f"--slurm: {name} is set by the executor; leave it out.")
        if name in ("nodes", "ntasks", "ntasks-per-node") and value != "1":
            raise ConfigError(f"--slurm: a job uses one node and one task; leave out {name}, or use torchrun.")


def gpus_of(settings: Mapping[str, str]) -> int:
    """Return how many GPUs each job gets with these options of sbatch; 1 where they name none.

    >>> gpus_of({"gres": "gpu:a100:4"}), gpus_of({"gpus-per-node": "2"}), gpus_of({"partition": "cpu"})
    (4, 2, 1)
    """
    for name in GPUS:
        value = settings.get(name, "")
        found = re.search(r"gpu\b(?::[a-z][\w.-]*)?:(\d+)" if name == "gres" else r"(\d+)$", value)
        if found:
            return max(1, int(found[1]))
    return 1


def preparing(settings: Mapping[str, str]) -> int:
    """Return how many jobs prepare the text, 0 where the command does so itself."""
    return int(settings.get(PREPARE, 0))


def options_of(kind: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the options of sbatch for jobs of a kind; those that prepare text need no GPU.

    >>> options_of("prepare", {"partition": "a", "gres": "gpu:4", "prepare": "2"})
    {'partition': 'a'}
    """
    left_out = (PREPARE, *GPUS) if kind == "prepare" else (PREPARE,)
    return {name: value for name, value in settings.items() if name not in left_out}


def submit(script: str, job: str, tasks: int, settings: Mapping[str, str]) -> str:
    """Submit an array of `tasks` jobs that run a script; return its number.

    Raises:
        QueueFull: Slurm takes no more jobs for now.
        ConfigError: it refuses these jobs; the message is its own.
    """
    given = {"signal": SIGNAL, "requeue": "", "open-mode": "append", **settings}
    options = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    own = ["--parsable", f"--job-name={job}", f"--array=0-{tasks - 1}", "--output=/dev/null", "--error=/dev/null"]
    pipe = subprocess.PIPE
    with subprocess.Popen(["sbatch", *own, *options], text=True, stdin=pipe, stdout=pipe, stderr=pipe) as sbatch:
        assert sbatch.stdin is not None and sbatch.stdout is not None and sbatch.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it does not read the script when an option is wrong
            sbatch.stdin.write(script)
            sbatch.stdin.close()
        said = []
        for line in sbatch.stderr:
            said.append(line)
            if any(words.lower() in line.lower() for words in FULL):  # it would try again for minutes
                sbatch.kill()
                raise QueueFull(line)
        number = sbatch.stdout.read().strip().partition(";")[0]
    if sbatch.returncode:
        raise ConfigError(f"Slurm refuses the jobs: {_sentence(said)}; correct --slurm.")
    return number


def queue() -> list[QueuedTask] | None:
    """Return the tasks of this user's jobs that have not ended, None while Slurm does not answer."""
    try:
        done = _run(["squeue", "--me", "--noheader", "--array", "--format=%j|%K|%T|%F|%r"])
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 4]
    return [
        QueuedTask(job=job, index=int(index), state=state, reason=reason, id=f"{array}_{index}")
        for job, index, state, array, reason in rows
        if index.isdecimal()
    ]


def cancel(ids: Collection[str]) -> None:
    """Cancel tasks or whole arrays."""
    if ids:
        _run(["scancel", *ids])


def describe_end(id: str) -> tuple[str, int | None]:
    """Return the state in which a task ended, such as CANCELLED, and its exit code; "" where Slurm has forgotten it."""
    done = _run(["scontrol", "--oneliner", "show", "job", id])
    state = re.search(r"\bJobState=(\w+)", done.stdout)
    code = re.search(r"\bExitCode=(\d+):", done.stdout)
    return (state[1] if state else ""), (int(code[1]) if code else None)


def requeue(id: str) -> bool:
    """Put a running task, such as 7_3, back into the queue; return whether that was done.

    It is not where the task is being cancelled. The number of an array alone would mean all of its tasks.
    """
    found = _run(["squeue", "--noheader", f"--jobs={id}", "--format=%T"])
    return found.stdout.strip() == "RUNNING" and _run(["scontrol", "requeue", id]).returncode == 0


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def _sentence(said: Sequence[str]) -> str:
    """Return the lines that a command of Slurm said, without its name and full stops."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip(" .\n") for line in said]
    return "; ".join(line for line in lines if line) or "it gave no reason"

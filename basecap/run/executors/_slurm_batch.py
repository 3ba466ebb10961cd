"""The files of an array of Slurm jobs in DIR/slurm/JOB, which the command and its jobs read and write.

tasks.json       what the tasks share, and the items of each: runs to try or to train, points to evaluate, or a text
<n>.json         the answer of task n, written when it ends: of each item, or the error that prevented all
<n>.log          what task n printed
"""

import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basecap.plan.runs import RunSpec
from basecap.run.evaluation_job import StoredPoint
from basecap.system.files import read_json, write_json

#: Exit code of a task that does not see the first of the paths that it needs; the others follow.
UNSEEN = 91


def run_item(run: RunSpec) -> dict[str, Any]:
    """Return what names a run to a task."""
    return {
        "key": run.label,
        "architecture": run.architecture,
        "run": [run.name, run.seed, run.rate],
        "hash": run.hash,
    }


def point_item(point: StoredPoint) -> dict[str, Any]:
    """Return what names an evaluation point to a task."""
    place = f"{point.run.label} step {point.step} branch {point.branch}"
    weights = None if point.weights is None else str(point.weights)
    names = {"step": point.step, "tokens": point.tokens, "weights": weights, "branch": point.branch}
    return {**run_item(point.run), "key": place, **names, "evaluations": list(point.evaluations)}


@dataclass(frozen=True)
class SlurmBatch:
    """An array of jobs: its directory is named like its jobs."""

    path: Path

    @classmethod
    def create(cls, out: Path, kind: str, shared: Mapping[str, Any], tasks: Sequence[Sequence[Any]]) -> "SlurmBatch":
        """Write the files of a new array of jobs."""
        batch = cls(out / "slurm" / f"basecap-{kind}-{secrets.token_hex(4)}")
        write_json(batch.path / "tasks.json", {"kind": kind, **shared, "tasks": [list(task) for task in tasks]})
        return batch

    @property
    def content(self) -> dict[str, Any]:
        """What was written for its tasks; {} when that is not there."""
        return read_json(self.path / "tasks.json") or {}

    def answer(self, index: int) -> dict[str, Any] | None:
        """Return the answer of a task, None before it ends."""
        return read_json(self.path / f"{index}.json")

    def write_answer(self, index: int, answer: Mapping[str, Any]) -> None:
        """Write the answer of a task."""
        write_json(self.path / f"{index}.json", dict(answer))

    def remove(self) -> None:
        """Remove the files of a batch that Slurm did not take."""
        shutil.rmtree(self.path, ignore_errors=True)

    def script(self, python: Path, needed: Sequence[Path]) -> str:
        """Return the script of its tasks: a task ends with a code of its own where it does not see a needed path."""
        here = shlex.quote(str(self.path))
        checks = [f"test -e {shlex.quote(str(path))} || exit {UNSEEN + n}" for n, path in enumerate(needed)]
        module = f"{shlex.quote(str(python))} -m basecap.run.executors._slurm_job"
        return "\n".join(
            (
                "#!/bin/bash",
                *checks,
                f"exec >>{here}/$SLURM_ARRAY_TASK_ID.log 2>&1",
                f"cd {shlex.quote(str(Path.cwd()))}",
                # The number of the job would not do: the last task of an array has that of the whole array.
                f'exec {module} {here} "$SLURM_ARRAY_TASK_ID" "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"',
                "",
            )
        )


def unseen(code: int | None, needed: Sequence[Path]) -> Path | None:
    """Return the path that a task with this exit code did not see."""
    number = -1 if code is None else code - UNSEEN
    return needed[number] if 0 <= number < len(needed) else None

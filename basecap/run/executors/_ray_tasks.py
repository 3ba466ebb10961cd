"""What a Ray task does on its node. Nothing here needs Ray, and a task finds this module installed on the node."""

import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from basecap.data import DataConfig, prepare
from basecap.errors import ConfigError, Interrupted
from basecap.plan.runs import RunSpec
from basecap.plugins import load_plugin
from basecap.records import RunInfo, StudyRecords
from basecap.run.evaluation_job import StoredPoint
from basecap.run.executors import _worker
from basecap.run.executors._packages import WEIGHTS, pack, unpack
from basecap.run.jobs import Execution, JobFailure, Trial
from basecap.run.provenance import refuse_other_precision
from basecap.system import environment
from basecap.train.interruption import listening


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What a task does.

    Attributes:
        key: of what all tasks of an executor share; a process prepares itself once for each.
        execution: what the jobs share, with the directory as the command sees it.
        directory: that the command works in.
        job: a function at the top level of this module.
        item: what it is about.
        run: directory of the run below that of the study, "" where the job writes to none.
    """

    key: str
    execution: Execution
    directory: Path
    job: Callable[[Execution, Any], Any]
    item: Any
    run: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a task returns: the result of its job, whether it was stopped, the files of its run where they come back."""

    result: Any = None
    stopped: bool = False
    package: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class TextErrand:
    """What a task that prepares text does: the section `data`, the cache, plugin files with the digests of their code.

    The command works in `directory`.
    """

    section: DataConfig
    cache: Path
    plugins: dict[Path, str]
    directory: Path


#: The key of the errands that this process is prepared for.
_prepared: list[str] = []


def attempt(execution: Execution, run: RunSpec) -> Trial:
    """Try a run; return what was found."""
    return _worker.attempt(run)


def train(execution: Execution, run: RunSpec) -> RunInfo | None:
    """Train a run and return its info, None where another command trains it."""
    device = environment.choose_device(execution.device)
    refuse_other_precision(StudyRecords(execution.out), execution.study, [run], device)
    return _worker.train(run)


def evaluate(execution: Execution, points: Sequence[StoredPoint]) -> list[dict[str, JobFailure]]:
    """Evaluate points of one run, whose weights are given below the study's directory; return what failed at each."""
    out = execution.out
    return [_worker.evaluate(replace(point, weights=point.weights and out / point.weights)) for point in points]


def prepare_text(errand: bytes) -> None:
    """Prepare a text together with the other tasks that are given the same pickled `TextErrand`.

    Raises:
        ConfigError: the node does not see the cache.
        DataError: the text cannot be prepared.
    """
    asked: TextErrand = pickle.loads(errand)
    if not asked.cache.is_dir():
        raise ConfigError(
            f"node {socket.gethostname()} does not see {asked.cache}; set data.cache to a directory that all nodes "
            "share, or leave out --ray prepare."
        )
    if asked.directory.is_dir():
        os.chdir(asked.directory)
    with listening():
        for path, digest in asked.plugins.items():
            load_plugin(path, digest)
        prepare(asked.section, asked.cache)


def perform(errand: bytes, study: bytes | None, run: bytes | None) -> bytes:
    """Do an errand; return the pickled `Answer`. A task that is cancelled stops with a checkpoint.

    Args:
        errand: a pickled `Errand`.
        study: the files of the study where its directory is not shared, see `pack`.
        run: those of the run that is written to.

    Raises:
        ConfigError: the node does not see the study's directory.
    """
    asked: Errand = pickle.loads(errand)
    with listening(), _directory(asked, study, run) as execution:
        try:
            if study is not None or [asked.key] != _prepared:
                _prepared[:] = []
                _worker.begin(execution)
                _prepared[:] = [asked.key]
            answer = Answer(result=asked.job(execution, asked.item))
        except Interrupted as stop:
            if stop.number != signal.SIGINT:  # the node ends: Ray tries the task again on another one
                os._exit(1)
            answer = Answer(stopped=True)
        if study is not None and asked.run:
            path = execution.out / asked.run
            skipped = WEIGHTS if asked.job is evaluate else ()
            names = [entry.name for entry in path.iterdir() if entry.name not in skipped] if path.exists() else []
            answer = replace(answer, package=pack(path, names))
    return pickle.dumps(answer)


@contextmanager
def _directory(errand: Errand, study: bytes | None, run: bytes | None) -> Iterator[Execution]:
    """Yield the execution with the study's directory on this node: the shared one, or a copy."""
    if study is None:
        if not (errand.execution.out / "lock").exists():
            raise ConfigError(
                f"node {socket.gethostname()} does not see {errand.execution.out}; give --out on a file system that "
                "all nodes share, or add --ray records=returned."
            )
        if errand.directory.is_dir():
            os.chdir(errand.directory)
        yield errand.execution
        return
    with TemporaryDirectory(prefix="basecap-") as name:
        unpack(study, Path(name))
        if run is not None:
            unpack(run, Path(name) / errand.run)
        yield replace(errand.execution, out=Path(name))

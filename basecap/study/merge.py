"""The study of a directory: read, and joined with more seeds, architectures, evaluations and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from basecap.data.config import DataConfig
from basecap.data.task_config import TaskSection
from basecap.errors import ConfigError
from basecap.evals import build_evaluation
from basecap.records import StudyRecords
from basecap.study.config import StudyConfig, validate
from basecap.study.recorded_plugins import refuse_absent_plugins
from basecap.study.value_errors import shown
from basecap.train.config import CHANGES_NO_NUMBER, TrainSection

T = TypeVar("T")


def held_study(records: StudyRecords) -> StudyConfig:
    """Return the study of a directory; raises ConfigError when a plugin file that it needs is not loaded."""
    refuse_absent_plugins(records)
    return validate(records.study(), str(records.path / "study.yaml"))


def merge_studies(held: StudyConfig, wanted: StudyConfig, where: Path) -> StudyConfig:
    """Return the study `held` in the directory `where` with what `wanted` adds to it.

    Seeds, architectures, evaluations and tasks of `wanted` come after those that are held.

    Words, which rows are controls, the figure, published numbers, what --only takes, where text is, where and by how
    many processes it is prepared, when evaluations run, which weights stay, whether CUDA graphs run and which
    evaluation point counts are those of `wanted`: no number of a run depends on them.

    Runs are continued to more tokens where the schedule of their learning rates does not depend on the number.

    Raises:
        ConfigError: they differ in anything else, or in what an architecture of one name is.
    """
    if held.scale != wanted.scale:
        raise ConfigError(f"{where} holds {held.title}, not {wanted.title}; give another --out.")
    theirs = {entry.name: entry for entry in wanted.architectures}
    for entry in held.architectures:
        other = theirs.get(entry.name, entry)
        _refuse_other(entry.model_copy(update={"control": other.control}), other, where, entry.name)
    seeds = {"seeds": _union(held.seeds, wanted.seeds)}
    if held.reference_seeds or wanted.reference_seeds:
        seeds["reference_seeds"] = _union(held.seeds_of(held.reference), wanted.seeds_of(wanted.reference))
    entries = {entry.name: entry for entry in held.architectures} | theirs
    longer = _longer(held.train, wanted.train, where)
    whole, alike = (
        study.model_copy(
            update={
                "summary": wanted.summary,
                "figure": wanted.figure,
                "any_architecture": wanted.any_architecture,
                "data": _data(study, wanted),
                "task": _task(study, held, wanted),
                "published": wanted.published,
                "train": study.train.model_copy(
                    update={key: getattr(wanted.train, key) for key in CHANGES_NO_NUMBER} | longer
                ),
                "evals": with_evaluations(held, wanted.evals, where).evals,
                "architectures": tuple(entries.values()),
                **seeds,
            }
        )
        for study in (held, wanted)
    )
    _refuse_other(whole, alike, where)
    if whole.task is not None:
        whole.task.refuse_two_readouts()
    if whole.length > held.length or (whole.model.vocab is None and whole.vocabulary > held.vocabulary):
        what = f"{held.length} tokens and a vocabulary of {held.vocabulary}"
        raise ConfigError(f"{where} has models of {what}, too few for the new tasks; give another --out.")
    return whole


def _longer(held: TrainSection, wanted: TrainSection, where: Path) -> dict[str, Any]:
    """Return the options of more tokens and branches, none where `wanted` has no more; raises ConfigError."""
    if held.schedule != wanted.schedule or held.tokens is None or wanted.tokens is None:
        return {}
    if not held.continues:
        if wanted.tokens > held.tokens:
            raise ConfigError(
                f"{where} has train.tokens = {held.tokens}, on which the schedule {held.schedule} depends; "
                "train anew into another --out, there with train.schedule = wsd or constant to continue it later."
            )
        return {}
    added = {*wanted.branches} - {*held.branches, held.tokens}
    if wanted.tokens >= held.tokens and added and min(added) < held.tokens:
        raise ConfigError(
            f"train.branches has {min(added)}, before the end of {where} at {held.tokens} tokens; branches can be "
            "added beyond it, others need another --out."
        )
    if wanted.tokens < held.tokens:
        return {}  # refused as another study
    branches = {*held.branches, *added} | ({held.tokens} if held.schedule == "wsd" else set())
    return {"tokens": wanted.tokens, "branches": tuple(sorted(branches - {wanted.tokens}))}


def _data(study: StudyConfig, wanted: StudyConfig) -> DataConfig | None:
    """Return the text of a study with where `wanted` has it: that it is the same text is checked by its content."""
    if study.data is None or wanted.data is None:
        return study.data
    return study.data.model_copy(update={key: getattr(wanted.data, key) for key in ("path", "cache", "workers")})


def _task(study: StudyConfig, held: StudyConfig, wanted: StudyConfig) -> TaskSection | None:
    """Return the tasks of a study with those of both; a single training task is in no run's name, so it stays one."""
    if study.task is None or held.task is None or wanted.task is None:
        return study.task
    several = len(held.task.train) > 1
    return study.task.model_copy(
        update={
            "train": _union(held.task.train, wanted.task.train) if several else study.task.train,
            "test": _union(held.task.tested, wanted.task.tested),
            "checkpoint": wanted.task.checkpoint,
            "shifts": wanted.task.shifts,
        }
    )


def with_evaluations(held: StudyConfig, entries: Sequence[str | dict[str, Any]], where: Path) -> StudyConfig:
    """Return the study `held` in the directory `where` with more evaluations.

    Args:
        held: the study.
        entries: as in a study file; those of existing evaluations may change `at`.
        where: the directory, to be named in an error.

    Raises:
        ConfigError: an evaluation of that name is held with other options, or is unknown.
    """
    theirs = {build_evaluation(entry).declaration.name: entry for entry in entries}
    evaluations = {build_evaluation(entry).declaration.name: entry for entry in held.evals}
    for name, entry in theirs.items():
        here, there = (
            build_evaluation(found).config.model_dump(exclude={"at"}) for found in (entry, evaluations.get(name, entry))
        )
        difference = _first_difference(there, here)
        if difference is not None:
            raise ConfigError(
                f"{where} holds {name!r} with other options ({difference}); to have both, give yours another name: "
                f"{type(build_evaluation(entry)).declaration.name}: {{name: NAME, ...}}."
            )
    return held.model_copy(update={"evals": tuple((evaluations | theirs).values())})


def _union(held: tuple[T, ...], wanted: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*held, *wanted)))


def _refuse_other(held: Any, wanted: Any, where: Path, name: str | None = None) -> None:
    difference = _first_difference(held.model_dump(mode="json"), wanted.model_dump(mode="json"))
    if difference is None:
        return
    if name is not None:  # a study of many runs need not go because of one
        raise ConfigError(
            f"{where} holds another architecture {name!r} ({difference}); give yours another name, or another --out."
        )
    raise ConfigError(f"{where} holds another study ({difference}); give another --out or remove it.")


def _first_difference(held: Any, wanted: Any, at: str = "") -> str | None:
    """Say where two studies differ first, None when they are the same."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for key in [*held, *wanted]:
            difference = _first_difference(held.get(key), wanted.get(key), f"{at}.{key}" if at else key)
            if difference is not None:
                return difference
        return None
    return None if held == wanted else f"{at} is {shown(held)} there and {shown(wanted)} here"

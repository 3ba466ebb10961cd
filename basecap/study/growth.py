"""The study of a directory grows: run again with more seeds or architectures, it holds those too."""

from pathlib import Path
from typing import Any

from basecap.errors import ConfigError
from basecap.study.config import StudyConfig


def grown(held: StudyConfig, wanted: StudyConfig, where: Path) -> StudyConfig:
    """Return the study `held` in the directory `where` with the seeds and architectures of `wanted` after its own.

    Words, and where and by how many processes text is prepared, are those of `wanted`: no number depends on them.

    Raises:
        ConfigError: they differ in anything else, or in what an architecture of one name is.
    """
    theirs = {entry.name: entry for entry in wanted.architectures}
    for entry in held.architectures:
        _refuse_other(entry, theirs.get(entry.name, entry), where, entry.name)
    seeds = {"seeds": _union(held.seeds, wanted.seeds)}
    if held.reference_seeds or wanted.reference_seeds:
        seeds["reference_seeds"] = _union(held.seeds_of(held.reference), wanted.seeds_of(wanted.reference))
    entries = {entry.name: entry for entry in held.architectures} | theirs
    preparation = {"cache": wanted.data.cache, "workers": wanted.data.workers}
    whole, alike = (
        study.model_copy(
            update={
                "summary": wanted.summary,
                "data": study.data.model_copy(update=preparation),
                "architectures": tuple(entries.values()),
                **seeds,
            }
        )
        for study in (held, wanted)
    )
    _refuse_other(whole, alike, where)
    return whole


def _union(held: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
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
    return None if held == wanted else f"{at} is {held!r} there and {wanted!r} here"

"""The rows of `basecap list`: mixers, backbones, studies, evaluations, tasks, domains and settings."""

import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from basecap.errors import ConfigError, nearest
from basecap.names import split_backbone
from basecap.study.study_file import READ_ONLY, library, read_study

if TYPE_CHECKING:
    from pydantic import BaseModel

# torch takes a second to import, numpy and pydantic a quarter: only the functions that need them import them, so that
# the other lists come at once.

#: Model size for which parameters and state are listed: the smaller published one.
HIDDEN, VOCAB, LENGTH = 768, 32_000, 2048
#: What a table is called where its name does not say enough.
TITLES = {"mixers": f"mixers, at their published depth: width {HIDDEN}, {VOCAB:,} token ids, {LENGTH:,} tokens"}


def _in_other_backbones() -> list[str]:
    """Return "X in Y" for each architecture that a built-in study puts into another backbone."""
    from basecap.study.architectures import entry_keys

    entries = [entry_keys(item) for name in library() for item in read_study(name)["architectures"]]
    return sorted({f"{entry['use']} in {entry['backbone']}" for entry in entries if entry.get("backbone")})


def _mixers(full: bool) -> list[dict[str, Any]]:
    """Architectures that a study compares, with parameters and decoding state."""
    from basecap.mixers import ARCHITECTURES
    from basecap.models.config import model_config
    from basecap.models.outline import outline

    rows = []
    for name in sorted([*ARCHITECTURES.names(), *_in_other_backbones()]):
        use, backbone = split_backbone(name)
        architecture = ARCHITECTURES.get(use)
        model = outline(model_config(use, hidden=HIDDEN, vocab=VOCAB, max_length=LENGTH, backbone=backbone))
        row = {
            "name": name,
            "parameters (M)": round(model.parameters_count() / 1e6, 1),
            "state (KiB)": model.state_bytes(LENGTH) // 1024,
            "backbone": backbone or architecture.backbone,
            "summary": architecture.summary,
        }
        if full:
            row |= {
                "hidden": HIDDEN,
                "vocab": VOCAB,
                "length": LENGTH,
                "blocks": model.config.depth,
                "parameters": model.parameters_count(),
                "state_bytes": model.state_bytes(LENGTH),
                "paper": architecture.paper,
                "origin": ARCHITECTURES.origin(use),
            }
        rows.append(row)
    return rows


def _backbones(full: bool) -> list[dict[str, Any]]:
    """Blocks that mixers are built into."""
    from basecap.models import BACKBONES

    return [{"name": name, "summary": entry.summary, "paper": entry.paper} for name, entry in BACKBONES.items()]


def _studies(full: bool) -> list[dict[str, Any]]:
    """Built-in studies, for `basecap run` and `basecap plan`."""
    rows = []
    for name, path in library().items():
        content = read_study(name)
        row = {
            "name": name,
            "architectures": len(content["architectures"]),
            "summary": content["summary"],
        }
        rows.append({**row, "path": str(path)} if full else row)
    return rows


def _evals(full: bool) -> list[dict[str, Any]]:
    """Evaluations that a study takes under evals, and `basecap eval` adds."""
    from basecap.evals import EVALUATIONS

    rows = []
    for name, entry in EVALUATIONS.items():
        row: dict[str, Any] = {
            "name": name,
            "measures on": entry.needs or "text or task",
            "unit": entry.declaration.unit,
            "better": entry.declaration.better,
            "summary": (entry.__doc__ or "").partition("\n")[0],
        }
        if full:
            row |= {
                "axes": entry.declaration.axes,
                "options": list(_keys(entry.Config, "")),
                "origin": EVALUATIONS.origin(name),
            }
        rows.append(row)
    return rows


def _tasks(full: bool) -> list[dict[str, Any]]:
    """Synthetic tasks that a study takes under task.train and task.test."""
    from basecap.plugins import faults
    from basecap.tasks import TASKS, build_task

    rows = []
    for name, entry in TASKS.items():
        task = build_task(name)
        with faults(f"task {name!r} cannot list its cells"):
            grid = task.grid()
        row = {"name": name, "cells": len(grid), "token ids": task.vocabulary, "summary": entry.summary}
        if full:
            row |= {
                "options": task.config.model_dump(),
                "grid": grid,
                "readout": task.readout,
                "source": entry.source,
                "origin": TASKS.origin(name),
            }
        rows.append(row)
    return rows


def is_task(name: str) -> bool:
    """Whether `name` is, or is close to, the name of a task rather than of a study."""
    studies = library()
    if name in studies or Path(name).exists() or Path(name).suffix in (".yaml", ".yml"):
        return False
    from basecap.tasks import TASKS

    close = difflib.get_close_matches(name, [*TASKS.names(), *studies], n=1)
    return bool(close) and close[0] not in studies


def _domains(full: bool) -> list[dict[str, Any]]:
    """Domains of text that a study takes under data.train and data.ood, by their source."""
    from basecap.data.sources import SOURCES
    from basecap.plugins import faults

    rows = []
    for name, entry in SOURCES.items():
        unknown = "(folders of data.path)" if "path" in entry.reads else "(as named on the hub)"
        for domain in entry.known_domains or (unknown,):
            with faults(f"source {name!r} cannot describe {domain!r}"):
                about = entry.about(domain)
            rows.append({"source": name, "domain": domain, **(about if full else {"summary": about["summary"]})})
    return rows


def _settings(full: bool) -> list[dict[str, Any]]:
    """Keys of a study file, which --set overrides."""
    from basecap.study.config import StudyConfig

    read_only = [{"key": key, "default": "", "description": words} for key, words in READ_ONLY.items()]
    return [*_keys(StudyConfig, ""), *read_only]


def _keys(section: "type[BaseModel]", prefix: str) -> Iterator[dict[str, Any]]:
    """Yield a row for every key of a section of the study file and its subsections; "[]" stands for a list entry."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = _section_in(field.annotation)
        if inner is not field.annotation:
            default = "(required)" if field.is_required() else field.get_default(call_default_factory=True)
            text = default if isinstance(default, str | None) else json.dumps(default)
            yield {"key": key, "default": text, "description": field.description or ""}
        if inner is not None:
            yield from _keys(inner, f"{key}[]." if _is_list(field.annotation) else f"{key}.")


def _is_list(annotation: Any) -> bool:
    """Whether a type is a list or an optional list."""
    return get_origin(annotation) is tuple or any(get_origin(part) is tuple for part in get_args(annotation))


def _section_in(annotation: Any) -> "type[BaseModel] | None":
    """Return the section class that a type is or contains, None when there is none."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


#: Kind to a function that returns its rows; the argument asks for all columns (for JSON).
CATALOGUES: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "mixers": _mixers,
    "backbones": _backbones,
    "studies": _studies,
    "evals": _evals,
    "tasks": _tasks,
    "domains": _domains,
    "settings": _settings,
}


def catalogue(what: str, full: bool) -> tuple[str, list[dict[str, Any]]]:
    """Return the title and the rows of a list, those of the lists themselves for ""; raises ConfigError.

    Args:
        what: key of CATALOGUES, or "".
        full: whether to take all columns (for JSON).
    """
    if not what:
        return "lists", [{"list": name, "summary": rows.__doc__} for name, rows in CATALOGUES.items()]
    if what not in CATALOGUES:
        raise ConfigError(f"cannot list {what!r}: {nearest(what, CATALOGUES)}")
    return TITLES.get(what, what), CATALOGUES[what](full)

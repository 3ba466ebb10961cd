"""What is recorded about the origin of the numbers of a run or study, and what must not change when it is resumed."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from basecap.analysis.study_files import Provenance, parse
from basecap.data.hashes import file_digest
from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.plan.runs import RunSpec
from basecap.records import RunRecords, StudyRecords
from basecap.registry import PLUGIN, plugin_digest
from basecap.study.config import StudyConfig, validate
from basecap.study.recorded_plugins import MODULE_OF, refuse_absent_plugins
from basecap.system import environment
from basecap.train.checkpoint import latest
from basecap.train.config import TrainSection
from basecap.train.loop import resolve

#: Keys of run.json about the machine. Directories of earlier versions lack them.
MACHINE = ("device", "precision", "packages")


def starting_info(records: RunRecords, run: RunSpec, device: torch.device) -> dict[str, Any]:
    """Return run.json of a run that starts or resumes now; `before` holds the other machines it was trained on."""
    found = environment.describe(device)
    machine = {
        "device": found["device"],
        "precision": resolve(run.train.precision, device),
        "packages": {"basecap": found["basecap"], **found["packages"]},
    }
    held = _info(records) if latest(records.resume) is not None else {}
    earlier = {key: held[key] for key in MACHINE if key in held}
    seconds = {"seconds": held["seconds"]} if "seconds" in held else {}
    return {
        "name": run.name,
        **({"architecture": run.architecture, "task": run.task} if run.task else {}),
        "seed": run.seed,
        "use": run.use,
        "lr": run.train.lr,
        "schedule": run.train.schedule,
        "tokens": run.train.tokens,
        "branches": list(run.train.branches),
        "hash": run.hash,
        "plugins": _sources(run.model),
        **machine,
        "before": (held.get("before") or []) + ([earlier] if earlier not in ({}, machine) else []),
        "status": "running",
        "message": "",
        **seconds,
    }


def continue_to_more_tokens(records: RunRecords, run: RunSpec, held: TrainSection) -> None:
    """Record that a run with fewer tokens is now `run`, and not finished; leave any other run as it is.

    Args:
        records: of the run.
        run: what it is to be.
        held: how the study trained before, for runs that did not record their tokens.

    Raises:
        ConfigError: the schedule depends on the number of tokens.
    """
    info = _info(records)
    tokens, branches = info.get("tokens", held.tokens), tuple(info.get("branches", held.branches))
    if info.get("hash") in (None, run.hash) or tokens is None or tokens >= run.train.tokens:
        return
    earlier = replace(run, train=run.train.model_copy(update={"tokens": tokens, "branches": branches}))
    if earlier.hash != info["hash"]:
        return
    if not run.train.continues or earlier.timetable.warmup != run.timetable.warmup:
        what = f"train.schedule = {run.train.schedule}"
        if run.train.continues:
            what = f"its warm-up of {earlier.timetable.warmup} steps"
        raise ConfigError(
            f"{records.path} cannot be continued from {tokens} to {run.train.tokens} tokens, as {what} depends on "
            "them; give another --out to train anew."
        )
    records.write_info(info | {"hash": run.hash, "status": "running"})


def refuse_other(records: RunRecords, run: RunSpec) -> None:
    """Raise ConfigError when `run` would not be what is recorded: another run, or another version of a plugin."""
    info = _info(records)
    if info.get("hash") not in (None, run.hash):
        raise ConfigError(f"{records.path} holds another run of that name; remove it or give another --out.")
    if latest(records.resume) is not None:  # else whatever is there begins again
        refuse_other_plugins(records, run.model)


def refuse_other_precision(
    records: StudyRecords, study: StudyConfig, wanted: Sequence[RunSpec], device: torch.device
) -> None:
    """Raise ConfigError when a study would be trained in two precisions because the device decides which.

    Args:
        records: of the study.
        study: all that its directory holds.
        wanted: the runs that are to be finished now.
        device: where.
    """
    auto = [run for run in wanted if run.train.precision == "auto"]
    if all(records.run(run.name, run.seed, run.rate).info().get("status") == "finished" for run in auto):
        return
    now = resolve("auto", device)
    names = [
        entry.name for entry in study.architectures if entry.train.get("precision", study.train.precision) == "auto"
    ]
    for found in (*records.runs(), *records.runs(sweep=True)):
        info = found.info()
        if architecture_of(info) not in names:
            continue
        trained = info.get("status") == "finished" or latest(found.resume) is not None
        if trained and info.get("precision") not in (None, now):
            raise ConfigError(
                f"{found.path} was trained in {info['precision']} on {info.get('device')}, and this device would "
                f"train in {now}; set --device {'cpu' if now == 'bf16' else 'cuda'}, or give another --out."
            )


def refuse_other_plugins(records: RunRecords, model: ModelConfig) -> None:
    """Raise ConfigError when a plugin or package that `model` needs is not there, or another than it was trained with.

    What else a run recorded does not matter: it used to be every plugin of its command.
    """
    held: dict[str, str] = _info(records).get("plugins") or {}
    if not held:
        return
    now: dict[str, str] = {}
    try:
        now = _sources(model)
        # Only runs of a plugin recorded any: without one this is another architecture of that name.
        other = [name for digest, name in now.items() if digest not in held] if now else list(held.values())
    except ConfigError as error:  # a name is not registered
        absent = absent_plugins(records)
        if absent:
            given = " ".join(f"--plugin {name}" for name in absent)
            raise ConfigError(f"{records.path} was trained with a plugin that is not given; add {given}.") from error
        other = list(held.values())
    if other:
        name = other[0]
        if not _is_file(name):
            name = next((was for digest, was in held.items() if digest not in now), name)
        what, how = f"{name}, not with what is installed", "install that one"
        if _is_file(name):
            what = f"another version of {name}, or of a file beside it that it imports"
            how = "restore that one with --plugin"
        raise ConfigError(f"{records.path} was trained with {what}; {how}, or train again into another --out.")


def plugin_entries(study: StudyConfig) -> dict[str, Any]:
    """Return the entry of environment.json on the plugin files of a study's evaluations, tasks and source, if any."""
    names = {
        "evaluation": [entry if isinstance(entry, str) else next(iter(entry)) for entry in study.evals],
        "task": [*study.task.train, *study.task.test] if study.task else [],
        "source": [study.data.source] if study.data else [],
    }
    parts: dict[str, dict[str, str]] = {}
    for kind, name in [(kind, name) for kind, known in names.items() for name in known]:
        module = MODULE_OF[kind](name)
        if module.startswith(PLUGIN):
            file = seen_from_here(_file(module))
            parts.setdefault(kind, {})[name] = file.name if file.is_absolute() else str(file)
    return {"plugins": parts} if parts else {}


def held_study(records: StudyRecords) -> StudyConfig:
    """Return the study of a directory; raises ConfigError when a plugin file that it needs is not loaded."""
    refuse_absent_plugins(records)
    return validate(records.study(), str(records.path / "study.yaml"))


def seen_from_here(file: Path) -> Path:
    """Return a path relative to the working directory where it lies below, as a command would name it."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def architecture_of(info: dict[str, Any]) -> str | None:
    """Return the architecture of a run, given its run.json; the run has another name where a study has many tasks."""
    return info.get("architecture", info.get("name"))


def absent_plugins(records: RunRecords) -> list[str]:
    """Return the names of the plugin files that a run recorded and that are not loaded now."""
    held: dict[str, str] = _info(records).get("plugins") or {}
    return [name for name in held.values() if _is_file(name) and PLUGIN + Path(name).stem not in sys.modules]


def _info(records: RunRecords) -> dict[str, Any]:
    """Return run.json, empty for a run that never started; raises DataError when it is damaged."""
    info = records.info()
    parse(info, Provenance, records.path / "run.json")
    return info


def _is_file(name: str) -> bool:
    """Whether run.json names a plugin file so, and not a package with its version."""
    return name.endswith(".py")


def plugin_files(model: ModelConfig) -> list[Path]:
    """Return the plugin files that a model's parts are defined in."""
    return [_file(module) for module in _plugins(model)]


def _plugins(model: ModelConfig) -> list[str]:
    """Return the modules of these files."""
    return [module for module in _modules(model) if module.startswith(PLUGIN)]


def _modules(model: ModelConfig) -> list[str]:
    """Return the modules that a model's parts are defined in."""
    modules = [BACKBONES.module(model.backbone), *(ARCHITECTURES.module(layer.use) for layer in model.layers)]
    choices = [choice for layer in model.layers for choice in ARCHITECTURES.get(layer.use).layers]
    modules += [part.__module__ for choice in choices for part in choice.mixer.__mro__]
    return list(dict.fromkeys(modules))


def _file(module: str) -> Path:
    return Path(sys.modules[module].__file__ or "")


def _sources(model: ModelConfig) -> dict[str, str]:
    """Return the plugin files of a model by their digests, and the packages by those of their version and module."""
    found = {plugin_digest(module): _file(module).name for module in _plugins(model)}
    for module in _modules(model):
        package = ARCHITECTURES.package_of(module) or BACKBONES.package_of(module)
        if package is not None:
            found[hashlib.sha256(f"{package} {file_digest(_file(module))}".encode()).hexdigest()] = package
    return found

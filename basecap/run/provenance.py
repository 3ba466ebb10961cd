"""What is recorded about the origin of the numbers of a run or study, and what must not change when it is resumed."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from basecap.data.hashes import file_digest
from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.plan.runs import RunSpec
from basecap.plugins import PLUGIN, plugin_digest
from basecap.records import Machine, RunInfo, RunRecords, StudyRecords
from basecap.study.config import StudyConfig
from basecap.study.recorded_plugins import MODULE_OF
from basecap.system import environment
from basecap.train.checkpoint import latest
from basecap.train.config import TrainSection
from basecap.train.deterministic import settings
from basecap.train.placement import resolve


def starting_info(records: RunRecords, run: RunSpec, device: torch.device, world: int = 1) -> RunInfo:
    """Return the info of a run that starts or resumes now in `world` processes.

    `before` holds the other machines that it was trained on.
    """
    copies, shard = run.train.mesh(world)
    found = environment.describe(device)
    machine = Machine(
        device=found["device"],
        precision=resolve(run.train.precision, device),
        packages={"basecap": found["basecap"], **found["packages"]},
        threads=found["threads"] if device.type == "cpu" else None,
        mesh={} if world == 1 else {"parallel": run.train.parallel, "replicate": copies, "shard": shard},
        deterministic=settings(run.train, device),
    )
    held = records.info() if latest(records.resume) is not None else None
    before = () if held is None else held.before
    if held is not None and held.machine not in (Machine(), machine, replace(machine, threads=None)):
        before = (*before, held.machine)
    return RunInfo(
        name=run.name,
        architecture=run.architecture if run.task else None,
        task=run.task,
        seed=run.seed,
        use=run.use,
        lr=run.train.lr,
        schedule=run.train.schedule,
        tokens=run.train.tokens,
        branches=tuple(run.train.branches),
        hash=run.hash,
        plugins=sources(run.model),
        device=machine.device,
        precision=machine.precision,
        packages=machine.packages,
        threads=machine.threads,
        mesh=machine.mesh,
        deterministic=machine.deterministic,
        before=before,
        seconds={} if held is None else held.seconds,
        status="running",
        message="",
    )


def continue_to_more_tokens(records: RunRecords, run: RunSpec, held: TrainSection) -> None:
    """Record that a run with fewer tokens is now `run`, and not finished; leave any other run as it is.

    Args:
        records: of the run.
        run: what it is to be.
        held: how the study trained before, for runs that did not record their tokens.

    Raises:
        ConfigError: the schedule depends on the number of tokens.
    """
    info = records.info()
    if info is None or info.hash in (None, run.hash):
        return
    tokens = held.tokens if info.tokens is None else info.tokens
    branches = tuple(held.branches) if info.branches is None else info.branches
    if tokens is None or tokens >= run.train.tokens:
        return
    earlier = replace(run, train=run.train.model_copy(update={"tokens": tokens, "branches": branches}))
    if earlier.hash != info.hash:
        return
    if not run.train.continues or earlier.timetable.warmup != run.timetable.warmup:
        what = f"train.schedule = {run.train.schedule}"
        if run.train.continues:
            what = f"its warm-up of {earlier.timetable.warmup} steps"
        raise ConfigError(
            f"{records.path} cannot be continued from {tokens} to {run.train.tokens} tokens, as {what} depends on "
            "them; give another --out to train anew."
        )
    records.write_info(replace(info, hash=run.hash, status="running"))


def refuse_other(records: RunRecords, run: RunSpec) -> None:
    """Raise ConfigError when `run` would not be what is recorded: another run, or another version of a plugin."""
    info = records.info()
    if info is not None and info.hash not in (None, run.hash):
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
    if all(records.run(run.name, run.seed, run.rate).finished for run in auto):
        return
    now = resolve("auto", device)
    names = [
        entry.name for entry in study.architectures if entry.train.get("precision", study.train.precision) == "auto"
    ]
    for found in (*records.runs(), *records.runs(sweep=True)):
        info = found.info()
        if info is None or info.series not in names:
            continue
        trained = info.finished or latest(found.resume) is not None
        if trained and info.precision not in (None, now):
            raise ConfigError(
                f"{found.path} was trained in {info.precision} on {info.device}, and this device would "
                f"train in {now}; set --device {'cpu' if now == 'bf16' else 'cuda'}, or give another --out."
            )


def refuse_other_plugins(records: RunRecords, model: ModelConfig) -> None:
    """Raise ConfigError when a plugin or package that `model` needs is not there, or another than it was trained with.

    What else a run recorded does not matter: it used to be every plugin of its command.
    """
    info = records.info()
    absent, other = other_plugins({} if info is None else info.plugins, model)
    if absent:
        given = " ".join(f"--plugin {name}" for name in absent)
        raise ConfigError(f"{records.path} was trained with a plugin that is not given; add {given}.")
    if other is not None:
        what, how = f"{other}, not with what is installed", "install that one"
        if _is_file(other):
            what = f"another version of {other}, or of a file beside it that it imports"
            how = "restore that one with --plugin"
        raise ConfigError(f"{records.path} was trained with {what}; {how}, or train again into another --out.")


def other_plugins(held: Mapping[str, str], model: ModelConfig) -> tuple[list[str], str | None]:
    """Return the plugin files that are not loaded, and the first plugin or package that is another than `model` had.

    Args:
        held: what the model had, by digests, as in `RunInfo.plugins`; nothing is compared when it is empty.
        model: what is built now.
    """
    if not held:
        return [], None
    now: dict[str, str] = {}
    try:
        now = sources(model)
        # Only runs of a plugin recorded any: without one this is another architecture of that name.
        other = [name for digest, name in now.items() if digest not in held] if now else list(held.values())
    except ConfigError:  # a name is not registered
        absent = absent_plugins(held)
        if absent:
            return absent, None
        other = list(held.values())
    if other and not _is_file(other[0]):
        other[0] = next((was for digest, was in held.items() if digest not in now), other[0])
    return [], other[0] if other else None


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


def seen_from_here(file: Path) -> Path:
    """Return a path relative to the working directory where it lies below, as a command would name it."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def absent_plugins(held: Mapping[str, str]) -> list[str]:
    """Return the names of the plugin files among the `plugins` of a run's info that are not loaded now."""
    return [name for name in held.values() if _is_file(name) and PLUGIN + Path(name).stem not in sys.modules]


def _is_file(name: str) -> bool:
    """Whether run.json names a plugin file so, and not a package with its version."""
    return name.endswith(".py")


def plugin_files(model: ModelConfig) -> list[Path]:
    """Return the plugin files that a model's parts are defined in."""
    return [_file(module) for module in _plugins(model)]


def loaded_plugins(model: ModelConfig) -> dict[Path, str]:
    """Return these files with the digests of the code that was loaded from them."""
    return {_file(module): plugin_digest(module) for module in _plugins(model)}


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


def sources(model: ModelConfig) -> dict[str, str]:
    """Return the plugin files of a model by their digests, and the packages by those of their version and module."""
    found = {plugin_digest(module): _file(module).name for module in _plugins(model)}
    for module in _modules(model):
        package = ARCHITECTURES.package_of(module) or BACKBONES.package_of(module)
        if package is not None:
            found[hashlib.sha256(f"{package} {file_digest(_file(module))}".encode()).hexdigest()] = package
    return found

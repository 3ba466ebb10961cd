"""How the numbers of a run came about, as run.json says it, and what may not change while it is continued."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from basecap import environment
from basecap.data.hashes import file_digest
from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models.backbones._contract import BACKBONES
from basecap.records import RunRecords
from basecap.study.plan import RunSpec
from basecap.train.checkpoint import latest
from basecap.train.loop import resolve

#: What run.json says of the machine. Directories of earlier versions lack it.
MACHINE = ("device", "precision", "packages")


def begun(records: RunRecords, run: RunSpec, plugins: Sequence[Path], device: torch.device) -> dict[str, Any]:
    """Return run.json of a run that begins or goes on now; `before` holds the other machines it was trained on."""
    found = environment.describe(device)
    machine = {
        "device": found["device"],
        "precision": resolve(run.train.precision, device),
        "packages": {"basecap": found["basecap"], **found["packages"]},
    }
    held = records.info() if latest(records.checkpoints) is not None else {}
    earlier = {key: held[key] for key in MACHINE if key in held}
    return {
        "name": run.name,
        "seed": run.seed,
        "use": run.use,
        "hash": run.hash,
        "plugins": _sources(run, plugins),
        **machine,
        "before": held.get("before", []) + ([earlier] if earlier not in ({}, machine) else []),
        "status": "running",
        "message": "",
    }


def refuse_other(records: RunRecords, run: RunSpec, plugins: Sequence[Path], device: torch.device) -> None:
    """Raise ConfigError when `run` would not be what is recorded: another run, plugin or precision."""
    info = records.info()
    if info.get("hash") not in (None, run.hash):
        raise ConfigError(f"{records.path} holds another run of that name; remove it or give another --out.")
    if latest(records.checkpoints) is None:  # whatever is there begins again
        return
    refuse_other_plugins(records, _sources(run, plugins))
    held, now = info.get("precision"), resolve(run.train.precision, device)
    if info.get("status") != "finished" and held not in (None, now):  # train.precision is auto: the device decides
        raise ConfigError(
            f"{records.path} was begun in {held} on {info.get('device')} and would go on in {now} on this device; set "
            f"--device {'cuda' if held == 'bf16' else 'cpu'}, or remove that directory to begin it again."
        )


def refuse_other_plugins(records: RunRecords, digests: Collection[str]) -> None:
    """Raise ConfigError unless every plugin that a run was trained with is among the `digests` of those there now."""
    changed = [name for digest, name in records.info().get("plugins", {}).items() if digest not in digests]
    if changed:
        raise ConfigError(
            f"{records.path} was trained with another version of {changed[0]}; restore that one with --plugin, give "
            "another --out, or remove that directory."
        )


def _sources(run: RunSpec, plugins: Sequence[Path]) -> dict[str, str]:
    """Return the plugin files' names by the hash of their content, none for an architecture that is built in."""
    own = any(ARCHITECTURES.from_plugin(layer.use) for layer in run.model.layers)
    if not own and not BACKBONES.from_plugin(run.model.backbone):
        return {}
    return {file_digest(path): path.name for path in plugins}

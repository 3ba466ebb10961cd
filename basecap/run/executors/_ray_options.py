"""The options of `--ray`:

address   HOST:PORT of a running cluster, or auto for the one that this machine belongs to; without it the cluster
          of Ray's own RAY_ADDRESS, else the last one that `ray start` began here, else Ray is started on this
          machine alone and ends with the command
cpus      processors of a task; 1 by default
gpus      GPUs of a task, such as 0.5 for two tasks on each; by default 1 divided by --per-device where the cluster
          has GPUs and --device is not cpu
retries   how often a task is tried again whose node or process was lost; 3 by default
prepare   how many tasks prepare the text together before anything is set up; by default the command does so
records   shared where all nodes see the study's directory, the default; returned where records, checkpoints and
          prepared text travel through Ray, and the command locks its runs until they are back
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from basecap.errors import ConfigError, nearest
from basecap.run.resources import Resources


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The options of `--ray`, see above; `gpus` is None where the cluster decides, `prepare` 0 for no task."""

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None
    retries: int = 3
    prepare: int = 0
    records: Literal["shared", "returned"] = "shared"

    @classmethod
    def of(cls, on: Resources) -> "RayOptions":
        """Read the settings of `on`; raises ConfigError."""
        read: dict[str, Callable[[str], Any]] = {
            "address": _address,
            "cpus": lambda text: _number(text, 0.01),
            "gpus": lambda text: _number(text, 0.0),
            "retries": lambda text: _whole_number(text, 0),
            "prepare": lambda text: _whole_number(text, 1),
            "records": _records,
        }
        if on.per_device == "auto":
            raise ConfigError("--per-device auto is for GPUs of this machine; give executor ray a number.")
        found = {}
        for name, text in on.settings.items():
            if name not in read:
                raise ConfigError(f"--ray has no option {name!r}: {nearest(name, read)}")
            try:
                found[name] = read[name](text)
            except ValueError as error:
                raise ConfigError(f"--ray {name}={text}: {error}.") from error
        if "prepare" in found and found.get("records") == "returned":
            raise ConfigError("--ray: prepare is for a cache that all nodes see; leave it out with records=returned.")
        return cls(**found)


def _number(text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < float("inf"):
        raise ValueError(f"give a number of at least {least:g}")
    return value


def _whole_number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"give a whole number of at least {least}")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text != "auto" and (not port.isdecimal() or not host or "/" in host):
        raise ValueError("give HOST:PORT of the head node, or auto")
    return text


def _records(text: str) -> str:
    if text not in ("shared", "returned"):
        raise ValueError("give shared or returned")
    return text

"""What the jobs of a study run on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: The option --per-device.
PerDevice = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the jobs of a study run on.

    Attributes:
        device: where models are; all GPUs of a machine, or the CPU, when None.
        per_device: how many jobs run at a time on each device; "auto" leaves that to the executor.
        executor: its name, see `basecap.run.executors`.
        settings: of the executor, such as {"partition": "gpu"}; "" for one without a value.
        threads: of the CPU for each run on one; what a trial step shows to be faster when None.
    """

    device: str | None = None
    per_device: PerDevice = 1
    executor: str = "local"
    settings: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None

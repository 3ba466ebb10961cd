"""Names of architectures, studies and devices, handled without importing any of them."""

import re

from basecap.errors import ConfigError

#: Name of the scale that the keys of a study file outside `scales` describe.
PAPER = "paper"
#: The device of Apple's GPUs.
MPS = "mps"
#: Name of the scale of a few steps, which shows that a study runs.
TEST = "test"


def split_backbone(name: str) -> tuple[str, str | None]:
    """Split "X in Y" (the mixers of architecture X in backbone Y) into X and Y; Y is None for a plain name.

    >>> split_backbone("transformer++ in rwkv-7"), split_backbone("mamba-2")
    (('transformer++', 'rwkv-7'), ('mamba-2', None))
    """
    use, separator, backbone = name.partition(" in ")
    return use, backbone if separator else None


def at_scale(name: str, scale: str | None) -> str:
    """Return the title of the study `name` at a scale; `scale` is None for a study of one size.

    >>> at_scale("quickstart", None), at_scale("limited-zoo", "laptop")
    ('quickstart', 'limited-zoo at scale laptop')
    """
    return name if scale is None else f"{name} at scale {scale}"


def check_device_name(name: str | None) -> str | None:
    """Return the name of a device, None for the default; raises ConfigError for a name that no device has."""
    if name == MPS:
        raise ConfigError("device 'mps' is only for basecap check, as nothing else has been tried there; use cpu.")
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"unknown device {name!r}; use cpu, cuda or cuda:0.")
    return name


def check_checked_device_name(name: str | None) -> str | None:
    """Return what `check_device_name` does; devices that only `basecap check` takes are names too."""
    return name if name == MPS else check_device_name(name)

"""Releases of libraries that compute wrong results on some GPUs: the only list of them.

Kernels, benchmarks and `basecap check` read it, so that a pair which is found to be wrong is entered once. An entry
cites who found it. What a kernel of this package avoids on every card, such as a transposed product, is said there.
"""

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

#: What entries are about: the kernels that ask, in words of a sentence.
FLA_DELTA = "the delta rules of flash-linear-attention"
PIPELINES = "loops that load ahead (ssd, wkv7, channel_delta_rule, forgetting_attention, token_choice)"

#: Names under which a library is installed too: by nightly releases of PyTorch, and on Windows.
OTHER_NAMES = {"triton": ("pytorch-triton", "triton-windows")}

#: Names of compute capabilities by their first number.
CARDS = {9: "Hopper", 10: "Blackwell"}


class KnownBad(NamedTuple):
    """One pair of releases and cards.

    Attributes:
        concerns: FLA_DELTA or PIPELINES.
        package: the library whose releases are wrong.
        first, before: the releases from `first` on, and before `before`; None: no release is known to be right.
        card: the first number of the compute capability of the GPUs; None: any GPU.
        fault: what happens, as a verb with its object.
        remedy: what to do, or what this package does.
        source: who found it.
    """

    concerns: str
    package: str
    first: str
    before: str | None
    card: int | None
    fault: str
    remedy: str
    source: str

    def holds(self, releases: Mapping[str, str], card: int) -> bool:
        """Whether it is about these releases by package, on a GPU of this compute capability's first number."""
        if self.package not in releases or self.card not in (None, card):
            return False
        release = _numbers(releases[self.package])
        return _numbers(self.first) <= release and (self.before is None or release < _numbers(self.before))

    def sentence(self, releases: Mapping[str, str]) -> str:
        """Return what is wrong and what to do, without a full stop."""
        where = "" if self.card is None else f" on {CARDS[self.card]}"
        name = f"{self.package} {releases[self.package]}"
        return f"{name} {self.fault} {self.concerns}{where} ({self.source}): {self.remedy}"


KNOWN_BAD = (
    KnownBad(
        FLA_DELTA, "fla-core", "0", "0.6.0", None, "is too old for", "install fla-core 0.6.0 or newer",
        "0.6.0 is the first release with the arguments that basecap passes",
    ),
    KnownBad(
        FLA_DELTA, "triton", "3.4.0", "3.7.1", 9, "computes wrong gradients of", "install triton 3.7.1 or newer",
        "fla-org/flash-linear-attention issues 640 and 984, pull request 983",
    ),
    KnownBad(
        FLA_DELTA, "triton", "3.4.0", "3.7.1", 10, "fails to compile, or computes NaN gradients of,",
        "install triton 3.7.1 or newer",
        "fla-org/flash-linear-attention issues 607 (3.4), 638 (3.5) and 913 (3.7.0)",
    ),
    KnownBad(
        PIPELINES, "triton", "3.0.0", None, 10, "may compile wrongly", "basecap loads nothing ahead there",
        "state-spaces/mamba issue 938 and pull request 997",
    ),
)  # fmt: skip


def known_bad(releases: Mapping[str, str], card: int) -> dict[str, str]:
    """Return by kernels what is wrong, what to do and who found it.

    Args:
        releases: installed releases by package.
        card: the first number of the GPU's compute capability.
    """
    found = [pair for pair in KNOWN_BAD if pair.holds(releases, card)]
    return {pair.concerns: pair.sentence(releases) for pair in reversed(found)}


@cache
def known_bad_on(device: torch.device) -> dict[str, str]:
    """Return what `known_bad` does for the installed releases on this GPU; {} on another device and on AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    return known_bad(_installed(), torch.cuda.get_device_capability(device)[0])


def _installed() -> dict[str, str]:
    found = dict[str, str]()
    for package in {pair.package for pair in KNOWN_BAD}:
        for name in (package, *OTHER_NAMES.get(package, ())):
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
                break
    return found


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in (*re.findall(r"\d+", release), 0, 0)[:3])

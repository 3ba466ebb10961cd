"""Releases of libraries that compute wrong results on some GPUs: the only list of them.

Kernels, benchmarks and `basecap check` read it, so that a pair which is found to be wrong is entered once. An entry
cites who found it. What a kernel of this package avoids on every card, such as a transposed product, is said there.

Of flash-linear-attention's delta rules on Hopper this is known. Triton 3.4 to 3.7.0 compiles gradients of the gated one
wrongly; 3.7.1 does not. The backward kernel of the delta rule with four warps is wrong with 3.7.1 too; fla-core 0.6.0
runs it with two. The cause of faults that are left is NVIDIA's assembler, 12.8.93 in Triton 3.7.1: from the same input
it makes wrong code of two kernels of the library's other ops where that of CUDA 13.1 does not, and up to CUDA 13.2 it
may overwrite an operand in registers that a product of a warp group still reads. No fault of the delta rules of 0.6.0
is known, but their kernels of outputs and of gradients have such products, as had the one with four warps: they are
used, and named as in doubt.
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

#: What entries call the assembler that Triton uses.
ASSEMBLER = "ptxas"

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
        doubted: nothing wrong is known of these kernels, but of others like them: they are used.
    """

    concerns: str
    package: str
    first: str
    before: str | None
    card: int | None
    fault: str
    remedy: str
    source: str
    doubted: bool = False

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
        FLA_DELTA, ASSEMBLER, "12.8", "13.3", 9, "may make wrong code of",
        "compare with basecap's own kernels, or let TRITON_PTXAS_PATH name the ptxas of CUDA 13.3 or newer",
        "fla-org/flash-linear-attention pull requests 988 and 1262, triton-lang/triton pull request 11781",
        doubted=True,
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
    return _sentences(releases, card, doubted=False)


def in_doubt(releases: Mapping[str, str], card: int) -> dict[str, str]:
    """Return the same of kernels that are used, because nothing wrong is known of them but of others like them."""
    wrong = known_bad(releases, card)
    found = _sentences(releases, card, doubted=True)
    return {concerns: sentence for concerns, sentence in found.items() if concerns not in wrong}


def _sentences(releases: Mapping[str, str], card: int, doubted: bool) -> dict[str, str]:
    found = [pair for pair in KNOWN_BAD if pair.doubted == doubted and pair.holds(releases, card)]
    return {pair.concerns: pair.sentence(releases) for pair in reversed(found)}


@cache
def known_bad_on(device: torch.device) -> dict[str, str]:
    """Return what `known_bad` does for the installed releases on this GPU; {} on another device and on AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    return known_bad(_installed(), torch.cuda.get_device_capability(device)[0])


@cache
def in_doubt_on(device: torch.device) -> dict[str, str]:
    """Return what `in_doubt` does for the installed releases on this GPU; as `known_bad_on`."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    card = torch.cuda.get_device_capability(device)[0]
    return in_doubt({**_installed(), **_assembler(card)}, card)


def _assembler(card: int) -> dict[str, str]:
    """Return the release of the assembler that Triton uses for a GPU, nothing where Triton does not say."""
    with contextlib.suppress(ImportError, AttributeError, TypeError, RuntimeError):
        from triton.backends.nvidia.compiler import get_ptxas

        return {ASSEMBLER: get_ptxas(10 * card).version}
    return {}


def _installed() -> dict[str, str]:
    found = dict[str, str]()
    for package in {pair.package for pair in KNOWN_BAD} - {ASSEMBLER}:
        for name in (package, *OTHER_NAMES.get(package, ())):
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
                break
    return found


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in (*re.findall(r"\d+", release), 0, 0)[:3])

"""`basecap check`: the conformance suite over every architecture and op, as rows for people."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.names import split_body
from basecap.progress import progress
from basecap.testing.check_mixer import LENGTH, LONGEST, check_mixer
from basecap.testing.check_op import OPS, check_op


def check_all(
    names: Sequence[str],
    device: torch.device,
    keep: Callable[[Iterator[dict[str, Any]]], None],
    longest: int = LONGEST,
) -> None:
    """Prove the contract for architectures; one row per check, its `result` "passed" or a sentence.

    Args:
        names: registered architectures, also in another's body, as "X in Y"; all, and all ops, when empty.
        device: where to run; on a GPU mixers and ops use their kernels, elsewhere an op's result says what ran.
        keep: called with each subject's rows, so that an interrupted check loses none of those before.
        longest: tokens of the sequence on which causality and decoding are proved besides shorter ones.

    Raises:
        ConfigError: an unknown name.
    """
    for use, body in map(split_body, names):
        ARCHITECTURES.get(use)
        if body is not None:
            BACKBONES.get(body)
    chosen = list(dict.fromkeys(names)) or ARCHITECTURES.names()
    ops = [] if names else list(OPS)
    with progress("check", total=len(chosen) + len(ops), unit="subjects") as advance:
        for name in chosen:
            keep(_mixer_rows(name, device, longest))
            advance(1, note=name)
        for name in ops:
            keep(_op_rows(name, device))
            advance(1, note=name)


def failures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the checks that did not pass."""
    return [row for row in rows if not row["result"].startswith("passed")]


def lengths(longest: int = LONGEST) -> str:
    """Return the sentence that says on how many tokens mixers are checked."""
    further = f", causality and decoding also of {longest:,}" if longest > LENGTH else ""
    return f"mixers are checked on sequences of {LENGTH} tokens{further}; --length chooses a longer one"


def _mixer_rows(name: str, device: torch.device, longest: int) -> Iterator[dict[str, Any]]:
    try:
        checks = check_mixer(name, device=device, longest=longest).checks
    except ConfigError as error:  # a mixer that cannot be built has failed; the others are checked all the same
        yield {"subject": name, "check": "runs", "error": None, "allowed": None, "result": f"{name}: {error}"}
        return
    for check in checks:
        yield {
            "subject": check.subject,
            "check": check.name,
            "error": _finite(check.error),
            "allowed": _finite(check.allowed),
            "result": "passed" if check.passed else check.message,
        }


def _finite(number: float | None) -> float | None:
    # JSON knows no infinity.
    return float(number) if number is not None and math.isfinite(number) else None


def _op_rows(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    for row in check_op(name, device):
        passed = "passed" if row["path"] == "kernels" else f"passed, {row['path']}"
        yield {
            "subject": name,
            "check": f"{row['tensor']} in {row['dtype'].removeprefix('torch.')}",
            "error": row["error"],
            "allowed": 2 * row["beside"],
            "result": passed if row["result"] == "passed" else row["result"],
        }

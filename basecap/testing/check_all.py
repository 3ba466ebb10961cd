"""`basecap check`: the conformance suite over every architecture, as rows for people."""

from collections.abc import Sequence
from typing import Any

import torch

from basecap.mixers._contract import ARCHITECTURES
from basecap.progress import progress
from basecap.testing.check_mixer import check_mixer


def check_all(names: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """Prove the contract for architectures (all when `names` is empty); one row per check.

    Args:
        names: registered architectures.
        device: where to run; on a GPU the mixers use their kernels.

    Raises:
        ConfigError: an unknown name.
    """
    chosen = list(names) or ARCHITECTURES.names()
    for name in chosen:
        ARCHITECTURES.get(name)
    rows = []
    with progress("check", total=len(chosen), unit="architectures") as advance:
        for name in chosen:
            for check in check_mixer(name, device=device).checks:
                rows.append(
                    {
                        "architecture": check.subject,
                        "check": check.name,
                        "error": float(check.error),
                        "allowed": float(check.allowed),
                        "result": "passed" if check.passed else check.message,
                    }
                )
            advance(1, note=name)
    return rows

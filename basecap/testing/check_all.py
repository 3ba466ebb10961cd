"""`basecap check`: the conformance suite over all architectures and ops, as table rows."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from basecap.errors import ConfigError, describe_error
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.names import split_backbone
from basecap.ops import without_numba
from basecap.registry import Registry
from basecap.system.progress import progress
from basecap.testing._harness import BATCH
from basecap.testing.check_mixer import DTYPES, LENGTH, LONGEST, check_mixer
from basecap.testing.check_op import OPS, check_op, unchecked
from basecap.testing.check_task import check_task


def check_all(
    names: Sequence[str],
    device: torch.device,
    on_rows: Callable[[Iterator[dict[str, Any]]], None],
    longest: int = LONGEST,
    tasks: Sequence[str] = (),
) -> list[str]:
    """Test architectures against the contract of mixers; one row per check, its `result` "passed" or a sentence.

    Args:
        names: registered architectures, or "X in Y" for another backbone; without any of them and of `tasks`, all
            architectures and all ops.
        device: where to run; ops are tested in every implementation that runs there, which the result names.
        on_rows: called with the rows of each subject as it is checked, so that an interruption loses no earlier rows.
        longest: length of the long test sequence, for causality and decoding; with none (0), mixers run plain PyTorch
            on a CPU, whose kernels take seconds to compile and have the test of their op.
        tasks: registered tasks.

    Returns:
        Sentences on the ops, without full stops: which implementations did not run.

    Raises:
        ConfigError: an unknown name.
    """
    for use, backbone in map(split_backbone, names):
        BACKBONES.get(backbone or ARCHITECTURES.get(use).backbone)
    chosen = list(dict.fromkeys(names)) or ([] if tasks else ARCHITECTURES.names())
    ops = [] if names or tasks else list(OPS)
    found: list[dict[str, Any]] = []
    with progress("check", total=len(chosen) + len(tasks) + len(ops), unit="subjects") as advance:
        for name in chosen:
            on_rows(_mixer_rows(name, device, longest))
            advance(1, note=name)
        for name in tasks:
            on_rows(_task_rows(name))
            advance(1, note=name)
        for name in ops:
            try:
                rows = check_op(name, device)
            except Exception as error:  # whatever a compiler or a driver raises; the other ops are still checked
                result = f"{describe_error(error)}."
                on_rows(iter([{"subject": name, "check": "runs", "error": None, "allowed": None, "result": result}]))
            else:
                on_rows(map(_op_row, rows))
                found += rows
            advance(1, note=name)
    left = [f"{runs} ({', '.join(ops)})" for runs, ops in unchecked(found).items()]
    return [f"implementations not checked, as they do not run here: {'; '.join(left)}"] if left else []


def registered_by(plugins: Sequence[Path], registry: Registry[Any]) -> list[str]:
    """Return the entries of a registry that plugin files register."""
    files = {str(path.resolve()) for path in plugins}
    return [name for name in registry.names() if sys.modules[registry.module(name)].__file__ in files]


def failures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the checks that failed."""
    return [row for row in rows if not row["result"].startswith("passed")]


def folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for the checks that each subject passed, then the rows of those that failed."""
    failed = failures(rows)
    passed = Counter(row["subject"] for row in rows if row not in failed)
    nothing = {"error": None, "allowed": None, "result": "passed"}
    counts = {name: f"{number} check{'s' if number > 1 else ''}" for name, number in passed.items()}
    return [{"subject": name, "check": count, **nothing} for name, count in counts.items()] + failed


def covered(longest: int = LONGEST) -> str:
    """Return a sentence with what mixers were checked on: rows, lengths, dtypes, inputs and indices of layers."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in (torch.float64, *DTYPES))
    own = f"{BATCH} rows of {LENGTH} tokens, normal inputs, {dtypes}, layer index 0"
    thorough = longest > LENGTH
    more = f"1 row of {longest if thorough else LONGEST:,} tokens, layer index 1"
    adds = f" (--thorough adds {more} and the kernels for CPUs)"
    further = f"; causality and decoding also on {more}" if thorough else adds
    return f"mixers were checked on {own}{further}. `basecap run` tests yours again in the sizes of its study."


def _mixer_rows(name: str, device: torch.device, longest: int) -> Iterator[dict[str, Any]]:
    try:
        with nullcontext() if longest > LENGTH else without_numba():
            checks = check_mixer(name, device=device, longest=longest).checks
    except ConfigError as error:  # a mixer that cannot be built fails; the others are still checked
        yield {"subject": name, "check": "runs", "error": None, "allowed": None, "result": str(error)}
        return
    for check in checks:
        yield {
            "subject": check.subject,
            "check": check.name,
            "error": _finite(check.error),
            "allowed": _finite(check.allowed),
            "result": "passed" if check.passed else f"{check.broken}.",
        }


def _task_rows(name: str) -> Iterator[dict[str, Any]]:
    for check, wrong in check_task(name):
        result = "passed" if wrong is None else f"{wrong.rstrip('.')}."
        yield {"subject": name, "check": check, "error": None, "allowed": None, "result": result}


def _finite(number: float | None) -> float | None:
    # JSON has no infinity
    return float(number) if number is not None and math.isfinite(number) else None


def _op_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "subject": row["op"],
        "check": f"{row['tensor']} in {row['dtype'].removeprefix('torch.')}",
        "error": row["error"],
        "allowed": 2 * row["beside"],
        "result": f"passed, {row['path']}" if row["result"] == "passed" else f"{row['result']} ({row['path']})",
    }

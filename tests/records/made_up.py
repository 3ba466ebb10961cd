"""Records that no run has written, for tests of what reads them."""

import json
from dataclasses import replace
from pathlib import Path

from basecap.records import RunInfo
from basecap.records.measured import Record

STUDY = {"name": "tiny", "data": {"train": ["prose"], "ood": ["code"]}, "train": {"lr": 1e-3}}


def run_info(name: str = "a", **rest: object) -> RunInfo:
    """Return the info of a finished run of seed 0, or what `rest` sets."""
    return replace(RunInfo(name=name, seed=0, use=name, status="finished", message=""), **rest)


def change(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def record(step: int = 1, value: float = 2.0, **more) -> Record:
    fields = {"tokens": 10 * step, "eval": "domain-loss", "subset": "code", "metric": "loss", "n": 5}
    return Record(step=step, value=value, **(fields | more))

"""What a study needs of this machine before it trains: its text, what evaluations read, free disk space."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from basecap.data import missing_inputs
from basecap.plan.runs import Plan, RunSpec, costs
from basecap.plan.workloads import cache_of
from basecap.records import StudyRecords

#: Bytes of the smallest report, most of it the scripts that draw its charts.
REPORT = 10**6


def missing(plan: Plan, out: Path) -> list[str]:
    """Return a sentence for each thing without which `basecap run` refuses the study; uses no network."""
    study = plan.study
    places, text = {"--out": out}, list[str]()
    if study.task is None:
        cache = cache_of(study.text, out)
        text = missing_inputs(study.text, cache)
        places |= {} if study.text.cache is None else {"data.cache": cache}
    nearest = {option: _nearest(place) for option, place in places.items()}
    place = [f"{path} is not a directory; give another {name}." for name, path in nearest.items() if not path.is_dir()]
    return [*place, *text, *(sentence for found in plan.evaluations for sentence in found.missing())]


def little_disk(runs: Sequence[RunSpec], out: Path) -> list[str]:
    """Return a sentence if the disk of `out` has less free space than the checkpoints, weights and report will take.

    What unfinished runs have already written counts as theirs.
    """
    records = StudyRecords(out)
    left = [run for run in runs if not records.run(run.name, run.seed, run.rate).finished]
    written = sum(_size(records.run(run.name, run.seed, run.rate).path) for run in left)
    needed = sum(found.resume + found.weights for found in costs(left)) - written + REPORT
    free = shutil.disk_usage(_nearest(out)).free
    if needed <= free or not left:
        return []
    keeps = ", or set train.keep=last" if any(run.train.keep != "last" for run in left) else ""
    return [
        f"the disk of {out} has {_text(free)} free, and checkpoints, weights and the report take about "
        f"{_text(needed)}; free disk space, or give another --out{keeps}."
    ]


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    return next(found for found in (path.absolute(), *path.absolute().parents) if found.exists())


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _text(size: int) -> str:
    """Write bytes in GiB, or in MiB below one GiB.

    >>> _text(3 * 2**29), _text(2**21)
    ('1.5 GiB', '2 MiB')
    """
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"

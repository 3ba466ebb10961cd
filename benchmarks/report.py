"""Time what a report takes: 20 architectures, 200 evaluation points, five domains of 300 documents.

Run `python -m benchmarks.report [DIR]` (its study stays in DIR). Seconds are those of the whole command `basecap
report`, medians of five, the first of which, that also makes the scripts of the page, does not count. The exit code is
1 when one of the limits is missed.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.report.synthetic import write_study

#: Architectures, evaluation points of a run, documents of a domain, runs of the reference beyond the one of the others.
ARCHITECTURES, POINTS, DOCUMENTS, MORE = 20, 200, 300, 4
#: Limits of seconds and of megabytes of the page.
SECONDS, MEGABYTES = 1.0, 6.0
TIMES = 5


def study(directory: Path) -> Path:
    """Write the study, unless it is there; return its directory."""
    path = directory / "study"
    if not (path / "study.yaml").exists():
        speeds = {f"architecture {index:02}": (0.9 + 0.01 * index, 0.005 * index) for index in range(1, ARCHITECTURES)}
        write_study(
            path,
            architectures={"reference": (1.0, 0.0), **speeds},
            more_of_reference=MORE,
            documents=DOCUMENTS,
            checkpoints=POINTS,
        )
    return path


def measured(path: Path) -> tuple[float, float]:
    """Write the report in another process; return seconds by the clock and of the processor."""
    # An installed package is compiled once, also where this process keeps no compiled modules.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(path.parent / "compiled")}
    command = [sys.executable, "-m", "basecap", "report", str(path)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, **compiled}, check=True)
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print seconds and megabytes; return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        path = study(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
        measured(path)
        rounds = [measured(path) for _ in range(TIMES)]
        clock, processor = (statistics.median(found) for found in zip(*rounds, strict=True))
        size = (path / "report.html").stat().st_size / 1e6
    runs = ARCHITECTURES + MORE
    print(f"{ARCHITECTURES} architectures, {runs} runs x {POINTS} evaluation points, {os.cpu_count()} cores")
    print(f"{clock:.2f} s, {processor:.2f} s of the processor; page {size:.2f} MB")
    return int(clock > SECONDS or size > MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())

"""A report that is written again while its studies run."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from basecap.records import StudyRecords
from basecap.report.page import write_report

#: Seconds between two checks of the records.
PAUSE = 2.0


def write_live_report(
    study_paths: Sequence[Path], out: Path, log: Callable[[str], None], costs: Sequence[Path] = ()
) -> Path:
    """Write the report whenever records change; the page reloads itself until the studies end.

    Returns once no process runs a study.

    Raises:
        ConfigError, DataError: as `write_report`.
    """
    studies = [StudyRecords(path) for path in study_paths]
    seen = None
    while True:
        busy = any(study.busy for study in studies)  # before the records are read: later changes count next time
        found = [study.state() for study in studies]
        if found != seen or not busy:
            page = write_report(study_paths, out, costs=costs, live=busy).page
            log(f"report: {page} ({time.strftime('%H:%M:%S')}{', the study is still running' if busy else ''})")
        if not busy:
            return page
        seen = found
        time.sleep(PAUSE)

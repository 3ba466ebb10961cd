"""The analysis of studies, whatever they were trained on."""

from collections.abc import Sequence
from pathlib import Path

from basecap.analysis.joined import Joined, joined_from_json
from basecap.analysis.recall import analyse_tasks
from basecap.analysis.results import StudyResults, from_json
from basecap.analysis.text import analyse_text
from basecap.records import StudyRecords


def analyse(study_dirs: Sequence[Path]) -> list[StudyResults]:
    """Analyse studies, each for itself.

    Raises:
        ConfigError: a directory that holds no study.
        DataError: records that cannot be read.
    """
    return [_analyse(StudyRecords(Path(path))) for path in study_dirs]


def _analyse(records: StudyRecords) -> StudyResults:
    return analyse_tasks(records) if records.study().get("task") else analyse_text(records)


def read_results(directory: Path) -> list[StudyResults]:
    """Return what results.json of a directory holds; raises DataError where it is missing or damaged."""
    return from_json(StudyRecords(directory).results(), directory / "results.json")


def read_joined(directory: Path) -> Joined | None:
    """Return the join that results.json of a directory holds, None without; raises DataError as `read_results`."""
    return joined_from_json(StudyRecords(directory).results(), directory / "results.json")

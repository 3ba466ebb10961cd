"""Statistics over records: reads files, never a model."""

from collections.abc import Sequence
from pathlib import Path

from basecap.analysis.joined import join
from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.tasks.task_study import analyse_tasks
from basecap.analysis.text.text_study import analyse_text, record_table
from basecap.records import StudyRecords

__all__ = ["StudyResults", "TaskResults", "TextResults", "analyse", "join", "record_table"]


def analyse(study_dirs: Sequence[Path]) -> list[StudyResults]:
    """Analyse studies, each for itself.

    Raises:
        ConfigError: a directory that holds no study.
        DataError: records that cannot be read.
    """
    every = [StudyRecords(Path(path)) for path in study_dirs]
    return [analyse_tasks(records) if records.study().get("task") else analyse_text(records) for records in every]

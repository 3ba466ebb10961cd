"""Statistics over records: reads files, never a model."""

from basecap.analysis.joined import join
from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.studies import analyse
from basecap.analysis.text.text_study import record_table

__all__ = ["StudyResults", "TaskResults", "TextResults", "analyse", "join", "record_table"]

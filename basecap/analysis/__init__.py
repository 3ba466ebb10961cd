"""Statistics over records: reads files, never a model."""

from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.studies import analyse, read_results

__all__ = ["StudyResults", "TaskResults", "TextResults", "analyse", "read_results"]

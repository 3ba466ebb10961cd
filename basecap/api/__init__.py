"""basecap from Python: what `basecap.open` and `basecap.load` return."""

from basecap.api.display import StudyFigure, StudyTable
from basecap.api.models import load_run
from basecap.api.study import Study, StudyRun, open_study
from basecap.run.trained import TrainedModel

__all__ = ["Study", "StudyFigure", "StudyRun", "StudyTable", "TrainedModel", "load_run", "open_study"]

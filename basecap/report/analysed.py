"""Studies as their readers see them, on the page and from Python: numbers, titles and charts."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from basecap.analysis import StudyResults, TextResults, analyse, join, record_table
from basecap.analysis.joined import Joined
from basecap.errors import DataError
from basecap.records import StudyRecords
from basecap.report import figures
from basecap.report.charts import Charts, charts_of, influence_charts
from basecap.report.joined_section import joined_charts
from basecap.report.summary import titles
from basecap.system.files import plain_names


@dataclass(frozen=True)
class Analysed:
    """Studies with their results.

    Attributes:
        paths: their directories.
        studies: their results.
        titles: a title for each.
        joined: what joins their numbers, None where that says no more than the results of the one study.
    """

    paths: Sequence[Path]
    studies: list[StudyResults]
    titles: list[str]
    joined: Joined | None

    def record_looks(self) -> None:
        """Record that the tables were seen: runs that are added from now on count as added after a look."""
        for study, path in zip(self.studies, self.paths, strict=True):
            if isinstance(study, TextResults):
                with contextlib.suppress(DataError):  # none are added where nothing can be written
                    record_table(StudyRecords(path), study)

    def charts(self) -> list[Charts]:
        """Draw the charts of each study by their file names, by section; None where there is nothing to draw."""
        every = []
        for study, path in zip(self.studies, self.paths, strict=True):
            charts = {**charts_of(study), **influence_charts(study, StudyRecords(path))}
            names = plain_names(name for members in charts.values() for name in members)
            every.append(
                {group: {names[name]: chart for name, chart in members.items()} for group, members in charts.items()}
            )
        return every

    def joined_charts(self) -> dict[str, figures.Spec]:
        """Draw the charts of what joins the studies, by their file names."""
        charts = {} if self.joined is None else joined_charts(self.joined)
        names = plain_names(charts)
        return {names[name]: chart for name, chart in charts.items()}


def analysed(paths: Sequence[Path], costs: Sequence[Path] = ()) -> Analysed:
    """Analyse the studies in directories, and join their numbers.

    Args:
        paths: directories of studies.
        costs: files that `basecap bench` wrote, for the joined part.

    Raises:
        ConfigError: a directory that holds no study.
        DataError: records that cannot be read.
    """
    studies = analyse(paths)
    named = titles(studies, paths)
    joined: Joined | None = join(studies, named, costs)
    if joined and joined.reference is None and len(studies) == 1 and not costs:
        joined = None
    return Analysed(paths, studies, named, joined)

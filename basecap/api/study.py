"""A study from Python: its tables, figures, runs and records."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from basecap.analysis import StudyResults
from basecap.api.display import StudyFigure, StudyTable
from basecap.api.models import load_run
from basecap.errors import ConfigError, nearest
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.report import Analysed, Sheet, Spec, Summary, analysed, every_sheet, findings_html, summarise
from basecap.run.trained import TrainedModel


@dataclass(frozen=True, repr=False)
class StudyRun:
    """A run of a study: one architecture, one seed.

    Attributes:
        path: its directory.
        info: what it is and how it went: `name`, `seed`, `status`, `parameters`, `seconds` and so on.
    """

    path: Path
    info: RunInfo

    def model(
        self, *, step: int | None = None, device: str | None = None, plugins: Sequence[str | Path] = ()
    ) -> TrainedModel:
        """Return its trained model, see `basecap.load`."""
        return load_run(self.path, step=step, device=device, plugins=plugins)

    def records(self) -> StudyTable:
        """Return every number that its evaluations measured, a row each, at every evaluation point."""
        return _table("records", _rows(self))

    def metrics(self) -> StudyTable:
        """Return its training log, a row per logged step: step, tokens, train_loss, lr and so on."""
        return _table("metrics", RunRecords(self.path).metrics())

    def __repr__(self) -> str:
        return f"StudyRun({self.info.name}, seed {self.info.seed}, {self.info.status})"


class Study:
    """A study on disk: what its report shows, its runs and their models.

    Its records are analysed when a table, a figure or the results are first asked for.

    Attributes:
        path: its directory.
    """

    def __init__(self, path: Path):
        """Take a directory; reads nothing."""
        self.path = path

    @cached_property
    def _analysed(self) -> Analysed:
        found = analysed([self.path])
        found.record_looks()
        return found

    @cached_property
    def _charts(self) -> dict[str, Spec | None]:
        (sections,) = self._analysed.charts()
        own = {name: chart for section in sections.values() for name, chart in section.items()}
        return own | self._analysed.joined_charts()

    @cached_property
    def _sheets(self) -> dict[str, Sheet]:
        return {sheet.name: sheet for sheet in every_sheet(self.results)}

    @property
    def title(self) -> str:
        """Its name with its scale."""
        return self._analysed.titles[0]

    @property
    def results(self) -> StudyResults:
        """Every number of the report, with the attributes that docs/results.md lists as keys of results.json."""
        return self._analysed.studies[0]

    @cached_property
    def summary(self) -> Summary:
        """Its findings in words: question, headline, reasons and cautions."""
        return summarise(self.results)

    @property
    def tables(self) -> list[str]:
        """The names of its tables, the main one first."""
        return [name for name, sheet in self._sheets.items() if sheet.rows]

    @property
    def figures(self) -> list[str]:
        """The names of its figures."""
        return [name for name, chart in self._charts.items() if chart is not None]

    @property
    def runs(self) -> list[StudyRun]:
        """Its runs that have started, by name and seed."""
        found = ((run.path, run.info()) for run in StudyRecords(self.path).runs())
        runs = [StudyRun(path, info) for path, info in found if info is not None]
        return sorted(runs, key=lambda run: (run.info.name, run.info.seed))

    def table(self, name: str | None = None) -> StudyTable:
        """Return a table of the report, one of `tables`.

        Args:
            name: of the table; None: the main one, a row per architecture with its verdict and gap (text), or with its
                accuracy on each task (tasks).

        Raises:
            ConfigError: there is no such table, or it has no rows yet.
        """
        chosen = next(iter(self._sheets)) if name is None else name
        sheet = self._sheets.get(chosen)
        if sheet is None or not sheet.rows:
            raise ConfigError(self._missing("table", chosen, self.tables, sheet is not None))
        return StudyTable(sheet)

    def figure(self, name: str) -> StudyFigure:
        """Return a figure of the report, one of `figures`, such as "gaps".

        Raises:
            ConfigError: there is no such figure, or nothing to draw in it yet.
        """
        chart = self._charts.get(name)
        if chart is None:
            raise ConfigError(self._missing("figure", name, self.figures, name in self._charts))
        return StudyFigure(name, deepcopy(chart))  # its reader may change it

    def run(self, name: str, seed: int = 0) -> StudyRun:
        """Return the run of an architecture with a seed; in a study of several tasks it is called "NAME on TASK".

        Raises:
            ConfigError: the study has no such run.
        """
        runs = self.runs
        own = {run.info.seed: run for run in runs if run.info.name == name}
        if not own:
            raise ConfigError(f"{self.path} has no run of {name!r}; {nearest(name, {run.info.name for run in runs})}")
        if seed not in own:
            raise ConfigError(
                f"{self.path} has no run of {name} with seed {seed!r}; give {' or '.join(map(str, own))}."
            )
        return own[seed]

    def records(self) -> StudyTable:
        """Return every number that the evaluations of all runs measured, a row each, at every evaluation point."""
        return _table("records", [row for run in self.runs for row in _rows(run)])

    def _missing(self, kind: str, name: str, known: Sequence[str], possible: bool) -> str:
        """Return the sentence about a table or figure that is not there, though such a study may have it."""
        if possible:
            return f"{self.path} has nothing to show in the {kind} {name!r}: {self.summary.headline}"
        return f"{self.path} has no {kind} {name!r}; {nearest(name, known)}"

    def _repr_html_(self) -> str:
        main = next(iter(self._sheets.values()))
        table = StudyTable(main)._repr_html_() if main.rows else ""
        return findings_html(self.title, self.results, self.summary) + table

    def __repr__(self) -> str:
        runs = self.runs
        return f"Study({self.path}, {sum(run.info.finished for run in runs)} of {len(runs)} runs finished)"


def open_study(directory: str | Path) -> Study:
    """Return the study in a directory, see `basecap.open`."""
    path = Path(directory).expanduser()
    StudyRecords(path).study()  # raises where there is none, or it cannot be read
    return Study(path)


def _rows(run: StudyRun) -> list[dict[str, Any]]:
    """Return the records of a run as rows; the place on an axis is in a column of its name."""
    who = {"name": run.info.name, "seed": run.info.seed}
    rows = (record.row() for record in RunRecords(run.path).evals())
    return [{**who, **{key: cell for key, cell in row.items() if key != "axis"}, **row["axis"]} for row in rows]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> StudyTable:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return StudyTable(Sheet(name, columns, [[row.get(column) for column in columns] for row in rows]))

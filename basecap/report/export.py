"""The tables of a report as files: CSV with plain numbers, Markdown and LaTeX as people print them."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from markupsafe import escape

from basecap.analysis.results import AnswerRow, EvaluationRow, StudyResults, TaskResults, TextResults
from basecap.analysis.rows import Estimate, Interval
from basecap.records.audits import METRICS
from basecap.records.token_classes import CLASSES
from basecap.report.audit_text import AuditedRow, audited_rows
from basecap.report.imported import imported_tables
from basecap.report.parts_text import origin_text
from basecap.report.published import published_numbers
from basecap.report.scores import ScoreTable, score_table
from basecap.report.summary import row_text
from basecap.report.table_rows import at_lowest, measured_on
from basecap.system.files import replacing, safe_name

#: What a cell holds.
Cell = str | int | float | Estimate | None


@dataclass(frozen=True)
class Sheet:
    """A table: its name, columns and rows, and the columns that are `intervals` even where no row has one."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    intervals: Sequence[str] = ()


def write_tables(studies: Sequence[StudyResults], out: Path, joined: Sequence[Sheet] = ()) -> list[Path]:
    """Write each table of studies, and those of their join, into the directory `out`; return the paths, three each.

    Raises:
        DataError: there is no room, or `out` is no directory.
    """
    named = [(safe_name(sheet.name), sheet) for sheet in joined]
    for index, study in enumerate(studies, start=1):
        prefix = f"{index}-" if len(studies) > 1 else ""
        named += [(prefix + safe_name(sheet.name), sheet) for sheet in sheets(study)]
    paths = []
    for name, sheet in named:
        for suffix, write in FORMS.items():
            path = out / f"{name}.{suffix}"
            with replacing(path, "another directory with --tables") as file:
                file.write(write(sheet).encode())
            paths.append(path)
    return paths


def sheets(study: StudyResults) -> Iterator[Sheet]:
    """Return the tables of a study that have rows."""
    return (sheet for sheet in every_sheet(study) if sheet.rows)


def every_sheet(study: StudyResults) -> Iterator[Sheet]:
    """Yield the tables of a study, also those without rows; the first says what it found."""
    yield from _text(study) if isinstance(study, TextResults) else _tasks(study)
    yield from _common(study)


def _text(study: TextResults) -> Iterator[Sheet]:
    verdicts: list[list[Cell]] = []
    gaps: list[list[Cell]] = []
    ranges: list[list[Cell]] = []
    for row in study.comparisons:
        found = row.gap
        verdicts.append([row.name, row.verdict, found, found.tokens if found else None, row_text(row, study)])
        if found is not None:
            low, high = row.range or (None, None)
            gaps.append([row.name, found.alone, found.single, at_lowest(row), row.weighted])
            runs = [len(row.seeds), len(row.reference_seeds)]
            ranges.append([row.name, found.bits_per_byte, found.tolerance, low, high, *runs])
    own = ("gap", "as if trained on, share")
    yield Sheet("verdicts", ["architecture", "verdict", *own, "why"], verdicts, intervals=own)
    heads = ["architecture", "verdict alone", "gap alone", "gap at lowest shared loss alone", "weighted gap"]
    yield Sheet("gaps", heads, gaps)
    heads = ["architecture", "gap, bits per byte", "tolerance", "range from", "range to", "runs", "reference runs"]
    yield Sheet("ranges", heads, ranges)
    heads = ["architecture", "domain", "verdict", "gap", "as if trained on, share", "gap, bits per byte", "tolerance"]
    by_domain: list[list[Cell]] = [
        [row.name, part.domain, part.verdict, part, part.tokens, part.bits_per_byte, part.tolerance]
        for row in study.comparisons
        for part in row.domains
    ]
    yield Sheet("domains", heads, by_domain)
    parts: list[list[Cell]] = [
        [row.name, row.gap, *row.parts, origin_text(row, study)] for row in study.comparisons if row.parts
    ]
    yield Sheet("gap-parts", ["architecture", "gap", *CLASSES, "in words"], parts)
    yield Sheet("audit", ["architecture", "gap", *_AUDIT, "in words"], [_audit(row) for row in audited_rows(study)])
    domains = [*study.train_domains, *study.ood_domains]
    heads = ["architecture", "seed", "step", "tokens", "training loss", "held-out loss", *domains]
    points: list[list[Cell]] = [
        [
            point.name,
            point.seed,
            point.step,
            point.tokens,
            point.training,
            point.held_out,
            *(point.loss_on(domain) for domain in domains),
        ]
        for point in study.points
    ]
    yield Sheet("evaluation-points", heads, points)
    documents: list[list[Cell]] = [
        [found.domain, found.documents, found.tokens, found.bytes] for found in study.documents
    ]
    yield Sheet("documents", ["domain", "documents", "tokens", "bytes"], documents)
    if (scores := score_table(study)) is not None:
        yield _scores(scores)
    for name, table in zip(("imported", "imported-evaluations"), imported_tables(study) or (), strict=False):
        yield Sheet(name, table.header, table.rows)


#: Columns of an audit: of the untrained form, then trained.
_AUDIT = [f"{metric} {of}" for metric in METRICS for of in ("untrained", "trained")]


def _audit(row: AuditedRow) -> list[Cell]:
    readings = row.audit.form, row.audit.trained
    return [row.audit.name, row.gap, *(getattr(found, name) for name in METRICS for found in readings), row.words]


def _scores(table: ScoreTable) -> Sheet:
    """Return the table of a paper: beside each published number what these runs scored, where they did."""
    heads = ["architecture"]
    for column in table.columns:
        heads += [f"{column} published"] if table.source else []
        heads += [f"{column} here", "standard error"] if table.measured else []
    rows: list[list[Cell]] = []
    for row in table.rows:
        cells: list[Cell] = [row.name]
        for published, own in zip(row.published, row.measured, strict=True):
            if table.source:
                cells.append(published)
            if table.measured:
                cells += [own.estimate, own.stderr] if own else [None, None]
        rows.append(cells)
    return Sheet("scores", heads, rows)


def _tasks(study: TaskResults) -> Iterator[Sheet]:
    place = ["architecture", "train", "test"]
    accuracies: list[list[Cell]] = [
        [row.architecture, row.train, row.test, row.accuracy, row.case_accuracy] for row in study.tests
    ]
    yield Sheet("accuracy", [*place, "accuracy", "case accuracy"], accuracies)
    shifts: list[list[Cell]] = [
        [row.architecture, row.train, row.test, row.cells, row.index, row.verdict] for row in study.shifts
    ]
    yield Sheet("shifts", [*place, "cells", "index", "verdict"], shifts)
    shortcuts: list[list[Cell]] = [[row.architecture, row.shifts, row.index] for row in study.shortcuts]
    yield Sheet("shortcuts", ["architecture", "shifts", "index"], shortcuts)
    cells: list[list[Cell]] = [
        [
            row.architecture,
            row.train,
            row.test,
            _cell(cell.axis),
            cell.accuracy,
            cell.case_accuracy,
            cell.examples,
        ]
        for row in study.tests
        for cell in row.cells
    ]
    yield Sheet("cells", [*place, "cell", "accuracy", "case accuracy", "examples"], cells)
    numbers = published_numbers(study)
    published: list[list[Cell]] = [
        [row.architecture, row.train, row.test, _cell(row.axis) or "mean", row.published, row.value, row.difference]
        for row in (numbers.rows if numbers else ())
    ]
    yield Sheet("published", [*place, "cell", "published", "ours", "difference"], published)


def _cell(axis: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in axis.items())


def _common(study: StudyResults) -> Iterator[Sheet]:
    runs = [
        [run.name, run.seed, run.status, run.parameters, run.state_bytes, run.tokens, run.tokens_per_s, run.seconds]
        for run in study.runs
    ]
    columns = ["name", "seed", "status", "parameters", "state bytes", "tokens", "tokens per s", "seconds"]
    yield Sheet("runs", columns, runs)
    rates = [
        [swept.name, rate, loss, "yes" if rate == swept.chosen else ""]
        for swept in study.sweep
        for rate, loss in zip(swept.rates, swept.losses, strict=True)
    ]
    yield Sheet("learning-rates", ["architecture", "rate", "loss", "chosen"], rates)
    for found in study.evaluations:
        rows: list[list[Cell]] = [
            [
                row.name,
                row.seed,
                row.subset,
                *(row.axis[axis] for axis in found.axes),
                row.metric,
                _estimate(row),
                row.stderr,
                row.n,
                row.unit or found.unit,
            ]
            for row in found.rows
        ]
        heads = ["name", "seed", "subset", *found.axes, "metric", "value", "stderr", "n", "unit"]
        yield Sheet(f"evaluation-{found.name}", heads, rows)
    columns = ["evaluation", "subset", "data", "runs"]
    yield Sheet(
        "measured-on", columns, [[row.evaluation, row.subset, row.data, row.runs] for row in measured_on(study)]
    )


def _estimate(row: EvaluationRow) -> Cell:
    """Return a number, with its interval if it has one."""
    return Interval(value=row.value or 0.0, low=row.low, high=row.high) if isinstance(row, AnswerRow) else row.value


#: How text begins that spreadsheets compute.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(sheet: Sheet) -> str:
    """Return a table as CSV (RFC 4180): numbers in full, an interval in three columns, nothing where there is none."""
    text = io.StringIO()
    writer = csv.writer(text)
    flat = flattened(sheet)
    for row in (flat.columns, *flat.rows):
        writer.writerow([_plain(cell) for cell in row])
    return text.getvalue()


def flattened(sheet: Sheet) -> Sheet:
    """Return a table with each interval in three columns: NAME, NAME low and NAME high."""
    wide = [
        name in sheet.intervals or any(isinstance(row[place], Estimate) for row in sheet.rows)
        for place, name in enumerate(sheet.columns)
    ]
    columns = [
        name
        for column, split in zip(sheet.columns, wide, strict=True)
        for name in ([column, f"{column} low", f"{column} high"] if split else [column])
    ]
    rows = [
        [
            part
            for cell, split in zip(row, wide, strict=True)
            for part in ([getattr(cell, end, None) for end in ("value", "low", "high")] if split else [cell])
        ]
        for row in sheet.rows
    ]
    return Sheet(sheet.name, columns, rows)


def _plain(cell: Cell) -> Cell:
    """Return a cell of CSV; text that a spreadsheet would compute begins with an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def to_markdown(sheet: Sheet) -> str:
    """Return a table as Markdown that GitHub shows; a name cannot become a tag or another column."""

    def safe(text: str) -> str:
        for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " "), ("\r", " ")):
            text = text.replace(mark, entity)
        return text

    lines = [sheet.columns, ["---"] * len(sheet.columns), *([_printed(cell) for cell in row] for row in sheet.rows)]
    return "".join(f"| {' | '.join(safe(cell) for cell in line)} |\n" for line in lines)


def to_html(sheet: Sheet) -> str:
    """Return a table as HTML, for notebooks."""
    numbers = [not any(isinstance(row[place], str) for row in sheet.rows) for place in range(len(sheet.columns))]
    styles = [f"text-align: {'right' if number else 'left'}; vertical-align: top" for number in numbers]
    lines = [("th", sheet.columns), *(("td", [_printed(cell) for cell in row]) for row in sheet.rows)]
    rows = [
        "".join(f'<{tag} style="{style}">{escape(text)}</{tag}>' for text, style in zip(texts, styles, strict=True))
        for tag, texts in lines
    ]
    return "".join(["<table>\n", *(f"<tr>{row}</tr>\n" for row in rows), "</table>"])


#: What means something in LaTeX -> what prints it.
IN_LATEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "…": r"\ldots{}", "–": "--",
    "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


#: Characters of the longest text in a column of LaTeX that does not break, and of a line of its head.
LONG, BROAD = 40, 18
#: A hyphen that is a minus.
NEGATIVE = re.compile(r"(?<!\w)-(?=\d)")
#: What a table of LaTeX begins with: one that is wider than the text is made smaller.
BEGIN = r"""% needs \usepackage{graphicx}
{\footnotesize\setlength{\tabcolsep}{3pt}%
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
"""
#: From here on decimals say nothing, and from there on digits.
LARGE, HUGE = 1000, 1e9


def to_latex(sheet: Sheet) -> str:
    """Return a table as a LaTeX tabular, at most as wide as the text; long text and long heads break."""
    places = []
    for place in range(len(sheet.columns)):
        if not any(isinstance(row[place], str) for row in sheet.rows):
            places.append("r")
        elif max(len(_printed(row[place])) for row in sheet.rows) > LONG:
            places.append(r"p{0.27\linewidth}")
        else:
            places.append("l")
    lines = [[_head(column, place) for column, place in zip(sheet.columns, places, strict=True)]]
    lines += [[_latex_cell(cell) for cell in row] for row in sheet.rows]
    head, *body = [" & ".join(line) + r" \\" for line in lines]
    begin = rf"{BEGIN}\begin{{tabular}}{{@{{}}{''.join(places)}@{{}}}}"
    return "\n".join([begin, r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}}}", ""])


def _latex_cell(cell: Cell) -> str:
    """Return a cell of LaTeX: an interval is small, below its value."""
    text = _in_latex(_printed(cell))
    if isinstance(cell, str):
        return text
    value, bracket, interval = NEGATIVE.sub("$-$", text).partition(" (")
    if not bracket:
        return value
    return rf"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{value} \\ \scriptsize ({interval}\end{{tabular}}"


def _head(column: str, place: str) -> str:
    """Return the name of a column that is aligned as `place` says, in lines."""
    first, *more = map(_in_latex, wrap(column, BROAD))
    if not more:
        return first
    lines = r" \\ ".join([first, *more])
    return rf"\shortstack[{'r' if place == 'r' else 'l'}]{{{lines}}}"


def _in_latex(text: str) -> str:
    return "".join(IN_LATEX.get(mark, mark) for mark in " ".join(text.split()))


def _printed(cell: Cell) -> str:
    if isinstance(cell, Estimate):
        ends = "" if cell.low is None or cell.high is None else f" ({_fixed(cell.low)} … {_fixed(cell.high)})"
        return f"{_fixed(cell.value)}{ends}"
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= LARGE else f"{cell:.4g}"
    return str(cell)


def _fixed(value: float) -> str:
    """Return a number with three decimals, none where it is large, and never as "-0.000".

    >>> _fixed(0.25), _fixed(-0.0001), _fixed(1234.5), _fixed(2.4e17)
    ('0.250', '0.000', '1234', '2e+17')
    """
    if abs(value) >= HUGE:
        return f"{value:.0e}"
    return f"{value:.0f}" if abs(value) >= LARGE else f"{round(value, 3) + 0.0:.3f}"


#: Suffix of a file -> what makes its text.
FORMS: dict[str, Callable[[Sheet], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}

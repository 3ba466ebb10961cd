"""One page per report: self-contained HTML that works without a network."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pydantic_core import to_json

from basecap.analysis import StudyResults
from basecap.analysis.joined import Joined
from basecap.analysis.results import to_json as results_to_json
from basecap.errors import ConfigError
from basecap.records import StudyRecords
from basecap.report import figures
from basecap.report.analysed import Analysed, analysed
from basecap.report.audit_text import audited_rows, share_text
from basecap.report.bundle import bundle, label, source_of
from basecap.report.figures.style import names_of
from basecap.report.images import ImageFormat, image
from basecap.report.imported import imported_tables, own_tokenizers
from basecap.report.joined_section import (
    cell_text,
    charted,
    ends_text,
    front_sentences,
    joined_sentences,
    measured,
    missing_costs,
)
from basecap.report.maturity_text import copies_text, direction_text, maturity_text
from basecap.report.palette import ON_DARK, Look, looks
from basecap.report.parts_text import origin_text, single_run_text
from basecap.report.published import left_out_text, published_figure, published_numbers
from basecap.report.scores import score_table
from basecap.report.summary import Summary, summarise, table_text
from basecap.report.table_rows import at_lowest, by_architecture, capacities, final_losses, measured_on, without_null
from basecap.report.task_summary import between, known_tasks, percent, points
from basecap.report.text_notes import notes
from basecap.report.text_summary import (
    duration_text,
    gap_text,
    interval_text,
    listed,
    runs_text,
    size_text,
    worth_interval_text,
    worth_text,
)
from basecap.system.files import read, real_path

#: Descriptions of charts by file name (without suffix), by the section of the page that shows them.
Groups = dict[str, dict[str, figures.Spec]]


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        page: its path.
        figures: the paths of its figures as files.
        studies, joined: what results.json holds.
        without_charts: why the page has no charts, as a sentence; None where it has them.
    """

    page: Path
    figures: list[Path]
    studies: list[StudyResults]
    joined: Joined | None
    without_charts: str | None


def write_report(
    study_paths: Sequence[Path],
    out: Path,
    *,
    costs: Sequence[Path] = (),
    live: bool = False,
    images: ImageFormat | None = None,
) -> Report:
    """Analyse studies; write results.json and report.html into `out`, without charts where they cannot be drawn.

    Args:
        study_paths: directories of studies; several are joined, and the gaps of one with its other numbers.
        out: directory to write to.
        costs: files that `basecap bench` wrote, for the joined part.
        live: whether the page reloads itself every ten seconds.
        images: format in which each figure is also written, to `out`/figures/NAME.svg or NAME.pdf.

    Raises:
        ConfigError: a directory holds no study or is given twice, or `out` holds a report that basecap did not write,
            or a study although others are given, or `images` cannot be drawn.
        DataError: records that cannot be read, results in `out` of runs that are not there any more, or no room to
            write.
    """
    _refuse_repeated(study_paths)
    records = StudyRecords(out)
    records.refuse_foreign_report()
    if records.has_study and [*map(real_path, study_paths)] != [real_path(out)]:
        # Its results.json would then hold other runs than it has, and it could not be resumed.
        raise ConfigError(
            f"{out} holds a study, whose own report this would replace; give another directory with --out."
        )
    found = analysed(study_paths, costs)
    studies, joined = found.studies, found.joined
    results = results_to_json(studies) | ({} if joined is None else {"joined": joined})
    records.refuse_lost_results(results, [failure.message for study in studies for failure in study.failures])
    records.write_results(results)
    found.record_looks()
    drawn, across = _drawn(found), found.joined_charts()
    files = {} if images is None else _files([*drawn, {"joined": across}], images)
    scripts, without = _scripts(out)
    if without is not None:
        drawn, across = [{group: {} for group in groups} for groups in drawn], {}
    choice = "" if joined is None else _joined(joined, found.titles, across)
    page = records.write_report(_page(studies, found.titles, drawn, choice, scripts, without, live), files)
    return Report(page, [out / "figures" / name for name in files], studies, joined, without)


def _scripts(out: Path) -> tuple[str, str | None]:
    """Return the scripts of the page, which an earlier report in `out` may have, and why there are none."""
    try:
        return bundle(read(out / "report.html") or b""), None
    except ConfigError as error:
        return "", str(error)


def _files(drawn: Sequence[Groups], form: ImageFormat) -> dict[str, bytes]:
    """Return the content of a file for every chart by its name."""
    return {
        f"{name}.{form}": image(chart, form)
        for groups in drawn
        for charts in groups.values()
        for name, chart in charts.items()
    }


def _refuse_repeated(paths: Sequence[Path]) -> None:
    found = [*map(real_path, paths)]
    for index, path in enumerate(found):
        if path in found[:index]:
            raise ConfigError(f"{paths[index]} is given twice; give each directory once.")


def _drawn(found: Analysed) -> list[Groups]:
    """Return the charts of each study that have data; of several studies their names begin with its number."""
    prefixes = [f"{index}-" if len(found.studies) > 1 else "" for index in range(1, len(found.studies) + 1)]
    return [
        {
            group: {prefix + name: chart for name, chart in members.items() if chart is not None}
            for group, members in charts.items()
        }
        for prefix, charts in zip(prefixes, found.charts(), strict=True)
    ]


def _joined(joined: Joined, named: Sequence[str], charts: dict[str, figures.Spec]) -> str:
    """Return the part that joins the studies called `named`; of a single one it is a part of its section."""
    return (
        _environment()
        .get_template("joined.html")
        .render(
            joined=joined,
            titles=named,
            charts=charts,
            sentences=joined_sentences(joined),
            fronts=front_sentences(joined),
            gaps=[measure for measure in joined.measures if measure.kind == "gap"],
            measured=measured(joined),
            looks=[look for look in figures.looks_of(joined) if look.name in charted(joined)],
            missing=missing_costs(joined),
            cell=cell_text,
            ends=ends_text,
        )
    )


def findings_html(title: str, study: StudyResults, summary: Summary) -> str:
    """Return the findings of a study in words, as its report begins."""
    found = _environment().get_template("findings.html").render(study=study, summary=summary)
    return f"<h3>{escape(title)}</h3>\n{found}"


def _page(
    studies: Sequence[StudyResults],
    named: Sequence[str],
    drawn: Sequence[Groups],
    choice: str,
    scripts: str,
    without_charts: str | None,
    live: bool,
) -> str:
    summaries = [summarise(study) for study in studies]
    own_script = _environment().get_template("page.js").render()
    return (
        _environment()
        .get_template("report.html")
        .render(
            sections=list(zip(studies, named, drawn, summaries, strict=True)),
            choice=Markup(choice),
            scripts=Markup(scripts),
            label=label(scripts),
            without_charts=without_charts,
            own_script=Markup(own_script),
            allowed=Markup(" ".join(map(source_of, filter(None, (scripts, own_script))))),
            on_dark=ON_DARK,
            live=live,
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("basecap.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies |= {"json.dumps_function": lambda content: to_json(content).decode(), "json.dumps_kwargs": {}}
    environment.filters |= {
        "gap": gap_text,
        "imported_tables": imported_tables,
        "interval": interval_text,
        "notes": notes,
        "maturity_words": maturity_text,
        "copies": copies_text,
        "direction": direction_text,
        "origin": origin_text,
        "own_tokenizers": own_tokenizers,
        "words": table_text,
        "single_run": single_run_text,
        "worth": worth_text,
        "worth_interval": worth_interval_text,
        "runs": runs_text,
        "duration": duration_text,
        "percent": percent,
        "between": between,
        "points": points,
        "at_lowest": at_lowest,
        "audited": audited_rows,
        "audit_share": share_text,
        "by_architecture": by_architecture,
        "capacities": capacities,
        "size_text": size_text,
        "published": published_numbers,
        "published_figure": published_figure,
        "left_out": left_out_text,
        "final": final_losses,
        "known_tasks": known_tasks,
        "measured_on": measured_on,
        "scores": score_table,
        "looks": _drawn_looks,
        "listed": listed,
        "yaml": lambda content: yaml.safe_dump(without_null(content), sort_keys=False, allow_unicode=True),
        "spec": _in_page,
    }
    return environment


def _drawn_looks(study: StudyResults, groups: Groups) -> list[Look]:
    """Return the looks of the architectures that any chart of a study draws, for the legend of the page."""
    charts = [chart for group in groups.values() for chart in group.values()]
    names = {row.get("name") for chart in charts for rows in chart["datasets"].values() for row in rows}
    return [look for look in looks(names_of(study), study.reference) if look.name in names]


def _in_page(chart: figures.Spec, legend: bool) -> figures.Spec:
    """Return the chart's description as wide as its place, without a legend of architectures if the page has one.

    A chart that must not stretch keeps its width.
    """
    width = {"width": "container"} if chart.get("usermeta", {}).get("stretches", True) else {}
    config = chart["config"] | {"background": "transparent"}
    return (chart if legend else _without_legend(chart)) | width | {"config": config}


def _without_legend(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_legend(member) for member in part]
    if not isinstance(part, dict):
        return part
    kept = {key: member if key == "datasets" else _without_legend(member) for key, member in part.items()}
    return kept | {"legend": None} if kept.get("field") == "name" and "legend" in kept else kept

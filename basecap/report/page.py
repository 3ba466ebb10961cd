"""One page per report: self-contained HTML that works without a network, and every figure beside it as SVG."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from basecap.analysis import analyse
from basecap.records import StudyRecords, safe_name
from basecap.report import figures
from basecap.report.titles import titles
from basecap.report.words import (
    duration,
    gap_text,
    headline,
    interval_text,
    notes,
    rates_text,
    reasons,
    remarks,
    runs_text,
    trained_models_only,
    unfinished,
    worth_interval_text,
    worth_text,
)

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])

#: Descriptions of charts by file name (without suffix), by the section of the page they stand in.
Groups = dict[str, dict[str, dict[str, Any]]]


def write_report(study_paths: Sequence[Path], out: Path) -> Path:
    """Analyse studies; write results.json, report.html and figures/*.svg into `out`; return the path of the page.

    Raises:
        ConfigError: a directory holds no study, or `out` a report that basecap did not write.
        DataError: records that cannot be read, results in `out` of runs that are not there any more, or no room to
            write.
    """
    records = StudyRecords(out)
    records.refuse_foreign_report()
    found = analyse(study_paths)
    records.refuse_loss(found)
    records.write_results(found)
    studies = records.results()["studies"]
    drawn = [draw(study, f"{index}-" if len(studies) > 1 else "") for index, study in enumerate(studies, start=1)]
    images = {
        f"{name}.svg": vl_convert.vegalite_to_svg(chart, vl_version=VEGA_LITE)
        for groups in drawn
        for charts in groups.values()
        for name, chart in charts.items()
    }
    return records.write_report(_page(studies, titles(studies, study_paths), drawn), images)


def draw(study: dict[str, Any], prefix: str = "") -> Groups:
    """Draw every figure of a study that has data; names of files begin with `prefix`."""
    domains = study["ood_domains"] or study["train_domains"]
    charts: dict[str, dict[str, figures.Chart | None]] = {
        "paper": figures.paper(study),
        "gaps": {"gaps": figures.forest(study), "gap-along-training": figures.along(study)},
        "held_out": {f"scatter-{domain}": figures.scatter(study, domain, "held_out") for domain in domains},
        "training": {
            f"scatter-{domain}-training-loss": figures.scatter(study, domain, "training") for domain in domains
        },
        "curves": {"training": figures.training(study)},
        "evaluations": dict(_evaluations(study)),
    }
    return {
        group: {
            prefix + safe_name(name): figures.styled(chart).to_dict()
            for name, chart in members.items()
            if chart is not None
        }
        for group, members in charts.items()
    }


def _evaluations(study: dict[str, Any]) -> Iterator[tuple[str, figures.Chart]]:
    for found in study["evaluations"]:
        panels = {(row["metric"], row["subset"] if found["axes"] else None) for row in found["rows"]}
        for metric, subset in sorted(panels, key=str):
            name = "-".join(part for part in (found["name"], metric, subset) if part)
            yield name, figures.evaluation(study, found, metric, subset)


def _page(studies: Sequence[dict[str, Any]], named: Sequence[str], drawn: Sequence[Groups]) -> str:
    environment = Environment(
        loader=PackageLoader("basecap.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "gap": gap_text,
        "interval": interval_text,
        "headline": headline,
        "reasons": reasons,
        "notes": notes,
        "remarks": remarks,
        "rates": rates_text,
        "worth": worth_text,
        "worth_interval": worth_interval_text,
        "runs": runs_text,
        "trained_models_only": trained_models_only,
        "unfinished": unfinished,
        "duration": duration,
        "yaml": lambda content: yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        "spec": _responsive,
    }
    return environment.get_template("report.html").render(
        sections=list(zip(studies, named, drawn, strict=True)), bundle=Markup(_bundle())
    )


@cache
def _bundle() -> str:
    """Return the scripts that draw charts in a page, which takes a second to put together."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE).replace("</script", "<\\/script")


def _responsive(chart: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's description, as wide as its place in the page."""
    return chart | {"width": "container"}

"""The figures of a study by the section of the page that shows them."""

from collections.abc import Iterator

from basecap.analysis.results import StudyResults, TaskResults, TextResults
from basecap.analysis.tasks.recall_rows import AccuracyRow
from basecap.records import StudyRecords
from basecap.report import figures
from basecap.report.audit_text import selection_chart

#: Charts by name, None where there is nothing to draw, by section.
Charts = dict[str, dict[str, figures.Spec | None]]


def charts_of(study: StudyResults) -> Charts:
    """Return the figures of a study."""
    return text_charts(study) if isinstance(study, TextResults) else task_charts(study)


def text_charts(study: TextResults) -> Charts:
    """Return the figures of a study of text."""
    domains = study.tested
    main: figures.Abscissa = "held_out" if study.ood_domains else "training"
    other: figures.Abscissa = "training" if study.ood_domains else "held_out"
    called = "training-loss" if study.ood_domains else "held-out-loss"
    return {
        "paper": figures.paper(study),
        "gaps": {
            "gaps": figures.forest(study),
            "gap-along-training": figures.gap_curve(study),
            "gap-over-tokens": figures.gap_curve(study, "tokens"),
        },
        "parts": {"gap-parts": figures.parts(study)},
        "audit": {"gap-against-selection": selection_chart(study)},
        "by_domain": {f"gaps-{domain}": figures.forest(study, domain) for domain in domains},
        "enlarged": {
            f"scatter-{domain}-enlarged": figures.scatter(study, domain, main, enlarged=True) for domain in domains
        },
        "whole": {f"scatter-{domain}": figures.scatter(study, domain, main, enlarged=False) for domain in domains},
        "other": {
            f"scatter-{domain}-{called}": figures.scatter(study, domain, other, enlarged=False) for domain in domains
        },
        "curves": {"training": figures.training(study)},
        "evaluations": dict(_evaluations(study)),
        "heat_maps": _heat_maps(study),
    }


def task_charts(study: TaskResults) -> Charts:
    """Return the figures of a study of tasks."""
    own = [row for row in study.tests if row.test == row.train]
    others = [row for row in study.tests if row.test != row.train]
    # Where the own pattern is not tested, the others show how much is recalled.
    first = own or others
    return {
        "matrices": {f"matrix-{name}": figures.matrix(study, name) for name in study.architectures},
        "regions": {f"regions-{task}": figures.regions(study, task) for task in study.test},
        "hardest_cells": {f"hardest-cells-{task}": figures.hardest_cells(study, task) for task in study.train},
        "cells": {f"cells-{_name(row)}": figures.cells(study, row) for row in first},
        "other_cells": {f"cells-{_name(row)}": figures.cells(study, row) for row in others if row not in first},
        "capacity": {
            f"capacity-{axis}-{_name(row)}": figures.capacity(study, row, axis)
            for axis in figures.axes_of(study)
            for row in first
        },
        "learning": {f"learning-{task}": figures.learning(study, task) for task in study.train},
        "evaluations": dict(_evaluations(study)),
        "heat_maps": _heat_maps(study),
    }


def influence_charts(study: StudyResults, records: StudyRecords) -> Charts:
    """Return the figures of which positions layers read, for the first run of each architecture that has such maps."""
    charts: dict[str, figures.Spec | None] = {}
    for run in study.runs:
        name, seed = run.name, run.seed
        if any(chart.startswith(f"influence-{name}-") for chart in charts):
            continue
        scores = _scores(study, name, seed)
        for eval, maps in records.run(name, seed).maps().items():
            charts[f"influence-{name}-{eval}"] = figures.influence(f"{name}, seed {seed}", maps, scores)
    return {"influence": charts}


def _scores(study: StudyResults, name: str, seed: int) -> dict[int, float]:
    """Return the selectivity of a run's layers, where it was measured: the signed score."""
    return {
        int(row.subset.removeprefix("layer ")): row.value
        for found in study.evaluations
        if found.name == "selectivity"
        for row in found.rows
        if (row.name, row.seed, row.metric) == (name, seed, "signed_score") and row.value is not None
    }


def _name(row: AccuracyRow) -> str:
    """Return the part of a file name that tells the figures of one row from those of another."""
    return f"{row.architecture},{row.train},{row.test}"


def _evaluations(study: StudyResults) -> Iterator[tuple[str, figures.Spec | None]]:
    for found in study.evaluations:
        if figures.has_layers(found):
            for metric in dict.fromkeys(row.metric for row in found.rows):
                yield f"{found.name}-{metric}", figures.layers(found, metric, study.names)
            continue
        drawn = [row for row in found.rows if figures.further_axis(found, row) is None]
        panels = {(row.metric, row.subset if found.axes else None) for row in drawn}
        for metric, subset in sorted(panels, key=str):
            name = "-".join(part for part in (found.name, metric, subset) if part)
            yield name, figures.evaluation(study, found, metric, subset)


def _heat_maps(study: StudyResults) -> dict[str, figures.Spec | None]:
    return {
        f"{found.name}-{name}": figures.heat_map(found, name) for found in study.evaluations for name in study.names
    }

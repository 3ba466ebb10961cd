"""The figure of a study of tasks: accuracy by training and test task, a heat map per architecture."""

from basecap.analysis.results import PublishedRow, TaskResults
from basecap.analysis.rows import Interval
from basecap.analysis.tasks.recall_rows import AccuracyRow
from basecap.report.figures.spec import Datum, Spec, category, chart, layer
from basecap.report.figures.style import BROKEN, SHARE_COLOUR, SHARE_INK, ref, tooltip
from basecap.report.published import published_numbers


def matrix(study: TaskResults, architecture: str) -> Spec | None:
    """Accuracy of one architecture, mean over cells: columns are training tasks, rows test tasks, own ones framed.

    Below our number are the published one and the number of runs.
    """
    found = published_numbers(study)
    published = {
        (row.train, row.test): row
        for row in (found.rows if found else ())
        if row.architecture == architecture and not row.axis
    }
    whole = found is not None and found.metric == "case_accuracy"
    rows = [
        _cell(row, (row.case_accuracy if whole else None) or row.accuracy, published.get((row.train, row.test)))
        for row in study.tests
        if row.architecture == architecture
    ]
    if not rows:
        return None
    look = {
        "x": category("train", study.train, "trained on", {"labelAngle": 0, "labelExpr": BROKEN}),
        "y": category("test", study.test, "tested on", {"labelExpr": BROKEN}),
    }
    ink = {**look, "color": SHARE_INK}
    shown = tooltip("name", "train", "test", "value", "low", "high", "published")
    frame = {"type": "rect", "filled": False, "stroke": "black", "strokeWidth": 2}
    ours = {"type": "text", "fontSize": 17, "fontWeight": 600, "dy": -10}
    layers = [
        layer(rows, {"type": "rect"}, {**look, "color": SHARE_COLOUR, "tooltip": shown}),
        layer(rows, frame, look, "datum.train == datum.test"),
        layer(rows, ours, {**ink, "text": ref("ours")}),
        layer(rows, {"type": "text", "fontSize": 11, "dy": 8}, {**ink, "text": ref("theirs")}),
        layer(rows, {"type": "text", "fontSize": 11, "dy": 22}, {**ink, "text": ref("runs")}),
    ]
    return chart(layers, width=110 * len(study.train), height=66 * len(study.test), title=architecture)


def published_text(value: float | None) -> str:
    """Return a published share in percent as its paper prints it, a cross for None."""
    return "✗" if value is None else f"{100 * value:.2f}"


def _cell(row: AccuracyRow, found: Interval, published: PublishedRow | None) -> Datum:
    count = len(row.seeds)
    return {
        "name": row.architecture,
        "train": row.train,
        "test": row.test,
        **vars(found),
        "published": published and published.published,
        "ours": f"{100 * found.value:.1f}",
        "theirs": "" if published is None else f"paper {published_text(published.published)}",
        "runs": "1 run" if count == 1 else f"{count} runs",
    }

"""The figure of a study of tasks: accuracy by training and test task, a heat map per architecture."""

from typing import Any

import altair as alt

from basecap.report.figures.look import BROKEN, Chart, Study, chart_of, positions, share_colour, share_ink, tooltip


def matrix(study: Study, architecture: str) -> Chart | None:
    """Accuracy of one architecture, mean over cells: columns are training tasks, rows test tasks, own ones framed.

    A published number stands below ours, then the number of runs.
    """
    published = {
        (row["train"], row["test"]): row["published"]
        for row in (study["published"] or {"rows": []})["rows"]
        if row["architecture"] == architecture and not row["axis"]
    }
    metric = (study["published"] or {"metric": "accuracy"})["metric"]
    rows = [
        _cell(row, row[metric] or row["accuracy"], published.get((row["train"], row["test"])))
        for row in study["tests"]
        if row["architecture"] == architecture
    ]
    if not rows:
        return None
    tasks = study["train"]
    base = chart_of(rows).encode(
        x=alt.X(**positions("train", tasks, "trained on"), axis=alt.Axis(labelAngle=0, labelExpr=BROKEN)),
        y=alt.Y(**positions("test", study["test"], "tested on"), axis=alt.Axis(labelExpr=BROKEN)),
    )
    squares = base.mark_rect().encode(
        color=share_colour("value"), tooltip=tooltip("name", "train", "test", "value", "low", "high", "published")
    )
    frames = base.transform_filter("datum.train == datum.test").mark_rect(
        filled=False, stroke="black", strokeWidth=2, tooltip=None
    )
    ours = base.mark_text(fontSize=17, fontWeight=600, dy=-10).encode(text="ours:N", color=share_ink("value"))
    theirs = base.mark_text(fontSize=11, dy=8).encode(text="theirs:N", color=share_ink("value"))
    runs = base.mark_text(fontSize=11, dy=22).encode(text="runs:N", color=share_ink("value"))
    return alt.layer(squares, frames, ours, theirs, runs).properties(
        width=110 * len(tasks), height=66 * len(study["test"]), title=architecture
    )


def _cell(row: dict[str, Any], found: dict[str, float], published: float | None) -> dict[str, Any]:
    count = len(row["seeds"])
    return {
        "name": row["architecture"],
        "train": row["train"],
        "test": row["test"],
        **{key: found[key] for key in ("value", "low", "high")},
        "published": published,
        "ours": f"{100 * found['value']:.1f}",
        "theirs": "" if published is None else f"paper {100 * published:.1f}",
        "runs": "1 run" if count == 1 else f"{count} runs",
    }

"""The figure of training on tasks: accuracy on validation examples over tokens."""

import altair as alt

from basecap.report.figures.look import Chart, Study, chart_of, choice, colour, shape, tooltip, unless


def learning(study: Study, task: str) -> Chart | None:
    """Accuracy of every run trained on `task` over tokens, mean over cells; larger marks are the points that count."""
    runs = {row["name"]: row["architecture"] for row in study["points"] if row["train"] == task}
    rows = [row | {"name": runs[row["name"]]} for row in study["learning"] if row["name"] in runs]
    if not rows:
        return None
    counts = {(runs[row["name"]], row["seed"], row["step"]) for row in study["points"] if row["train"] == task}
    marked = [row for row in rows if (row["name"], row["seed"], row["step"]) in counts]
    named, chosen = study | {"names": study["architectures"]}, choice()
    x = alt.X("tokens:Q", title="tokens", axis=alt.Axis(format="~s", grid=False), scale=alt.Scale(nice=False))
    scale, axis = alt.Scale(domain=[0, 1], nice=False), alt.Axis(format=".0%", tickCount=5)
    look = {
        "x": x,
        "y": alt.Y("accuracy:Q", title="accuracy on validation examples", scale=scale, axis=axis),
        "color": colour(named, rows),
        "detail": "seed:N",
        "opacity": unless(chosen),
    }
    lines = chart_of(rows).mark_line(strokeWidth=1.5).encode(**look)
    points = (
        chart_of(marked)
        .mark_point(filled=True, size=80)
        .encode(shape=shape(named, rows), tooltip=tooltip("name", "seed", "tokens", "accuracy"), **look)
    )
    return alt.layer(lines, points.add_params(chosen)).properties(width=420, height=260, title=f"trained on {task}")

"""Entropy of the attention distribution over the temperature: figure 4 of the first paper (arXiv 2505.18522)."""

from collections import defaultdict
from statistics import mean

import altair as alt

from basecap.report.figures.look import Chart, Study, chart_of, colour, shape, tooltip

EVALUATION, OPTION = "influence-entropy", "temperature"


def entropy(study: Study) -> tuple[Chart | None, None]:
    """Return a point per run with a temperature, and a line through their means; the paper prints no numbers."""
    temperatures = {
        entry["name"]: entry["mixer"][OPTION]
        for entry in study["settings"]["architectures"]
        if OPTION in entry.get("mixer", {})
    }
    found = defaultdict(list)
    for evaluation in study["evaluations"]:
        for row in evaluation["rows"] if evaluation["name"] == EVALUATION else ():
            if row["name"] in temperatures and row["value"] is not None:
                found[row["name"], row["seed"]].append(row["value"])
    rows = [
        {"name": name, "seed": seed, OPTION: temperatures[name], "entropy": mean(values)}
        for (name, seed), values in found.items()
    ]
    if not rows:
        return None, None
    x = alt.X(f"{OPTION}:Q", scale=alt.Scale(type="log", base=2, nice=False), title="softmax temperature")
    words = "entropy, mean over layers, heads and domains (nats)"
    line = chart_of(rows).mark_line(strokeWidth=1.2, color="black").encode(x=x, y=alt.Y("mean(entropy):Q", title=words))
    points = (
        chart_of(rows)
        .mark_point(filled=True, size=70)
        .encode(
            x=x,
            y=alt.Y("entropy:Q", title=words),
            color=colour(study, rows),
            shape=shape(study, rows),
            tooltip=tooltip("name", "seed", OPTION, "entropy"),
        )
    )
    return alt.layer(line, points).properties(width=420, height=320, title="measured here"), None

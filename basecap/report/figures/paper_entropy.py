"""Entropy of the attention distribution over the temperature: figure 4 of the first paper (arXiv 2505.18522)."""

from collections import defaultdict
from statistics import mean

from basecap.analysis.results import TextResults
from basecap.analysis.study_files import Figure
from basecap.report.figures.spec import Spec, chart, layer, number, unless_picked
from basecap.report.figures.style import colour, shape, tooltip

EVALUATION, OPTION = "influence-entropy", "temperature"


def entropy(study: TextResults, figure: Figure) -> tuple[Spec | None, None]:
    """Return a point per run with a temperature, and a line through their means; the paper prints no numbers."""
    temperatures = {
        entry["name"]: entry["mixer"][OPTION]
        for entry in study.settings["architectures"]
        if OPTION in entry.get("mixer", {})
    }
    found = defaultdict(list)
    for evaluation in study.evaluations:
        for row in evaluation.rows if evaluation.name == EVALUATION else ():
            if row.name in temperatures and row.value is not None:
                found[row.name, row.seed].append(row.value)
    rows = [
        {"name": name, "seed": seed, OPTION: temperatures[name], "entropy": mean(values)}
        for (name, seed), values in found.items()
    ]
    if not rows:
        return None, None
    x = number(OPTION, "softmax temperature", {"type": "log", "base": 2, "nice": False})
    y = number("entropy", "entropy, mean over layers, heads and domains (nats)")
    point = {
        "x": x,
        "y": y,
        "color": colour(study, rows),
        "shape": shape(study, rows),
        "opacity": unless_picked(),
        "tooltip": tooltip("name", "seed", OPTION, "entropy"),
    }
    layers = [
        layer(rows, {"type": "line", "strokeWidth": 1.2, "color": "#1b1b1b"}, {"x": x, "y": y | {"aggregate": "mean"}}),
        layer(rows, {"type": "point", "filled": True, "size": 70}, point),
    ]
    return chart(layers, width=420, height=320, title=f"measured here{_length(study)}", pick=True), None


def _length(study: TextResults) -> str:
    """Return the length of the documents, which entropy depends on; "" where the study does not give it."""
    found = [entry[EVALUATION] for entry in study.settings["evals"] if isinstance(entry, dict) and EVALUATION in entry]
    return f", on {found[0]['length']:,} tokens" if found and "length" in found[0] else ""

"""The figure of what is read: which of the places that hold a right answer a model takes it from."""

from basecap.analysis.results import TaskResults
from basecap.analysis.rows import Estimate
from basecap.analysis.tasks.recall_rows import AccuracyRow
from basecap.report.figures.spec import Datum, Spec, category, chart, layer, number
from basecap.report.figures.style import PERCENT, SHARE, ref, tooltip

#: What is read from no region.
NONE = "none of them"


def regions(study: TaskResults, test: str) -> Spec | None:
    """Shares of the queried values answered with each region's value: a bar per architecture and training task."""
    found = [row for row in study.tests if row.test == test and row.regions]
    if not found:
        return None
    count = max(len(row.regions) for row in found)
    labels = [*map(str, range(1, count + 1)), NONE]
    rows = [part for row in found for part in _parts(row)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    y = category("name", names, None, {"labelLimit": 190})

    def x(field: str) -> Spec:
        return number(field, "share of queried values", SHARE, PERCENT)

    bar = {
        "y": y,
        "x": x("from"),
        "x2": ref("to"),
        "color": {
            "field": "region",
            "type": "nominal",
            "scale": {"domain": labels, "range": [*_blues(count), "#dddddd"]},
            "legend": {"title": "region that is read", "orient": "bottom", "values": labels, "columns": count + 1},
        },
        "tooltip": tooltip("name", "region", "value", "low", "high"),
    }
    number_ = {
        "y": y,
        "x": x("middle"),
        "text": ref("text"),
        "color": {"field": "ink", "type": "nominal", "scale": None},
    }
    layers = [
        layer(rows, {"type": "bar", "stroke": "white"}, bar),
        layer(rows, {"type": "text", "fontSize": 11}, number_, "datum.value * width >= 45"),  # pixels a number needs
    ]
    return chart(layers, width=480, height=30 * len(names) + 10, title=test)


def _parts(row: AccuracyRow) -> list[Datum]:
    """Return the pieces of one bar."""
    count, start, parts = len(row.regions), 0.0, []
    rest = Estimate(value=max(0.0, 1 - sum(part.value for part in row.regions)), low=None, high=None)
    for index, share in enumerate([*row.regions, rest]):
        region = str(index + 1) if index < count else NONE
        percent = f"{100 * share.value:.0f} %"
        parts.append(
            {
                "name": f"{row.architecture} on {row.train}",
                "region": region,
                **vars(share),
                "from": start,
                "to": start + share.value,
                "middle": start + share.value / 2,
                "text": f"{region}: {percent}" if index < count else percent,
                "ink": "white" if index < count / 2 else "black",
            }
        )
        start += share.value
    return parts


def _blues(count: int) -> list[str]:
    """Return colours from dark, the first region, to light, the last."""
    dark, light = (0x08, 0x45, 0x94), (0xC6, 0xDB, 0xEF)
    steps = [index / max(1, count - 1) for index in range(count)]
    mixed = [[round(a + step * (b - a)) for a, b in zip(dark, light, strict=True)] for step in steps]
    return ["#" + "".join(f"{part:02x}" for part in colour) for colour in mixed]

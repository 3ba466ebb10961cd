"""Published numbers of a study of tasks beside what its runs answered."""

from collections.abc import Mapping, Sequence
from typing import Any


def with_published(
    published: Mapping[str, Any] | None, tests: Sequence[Mapping[str, Any]], train: Sequence[str]
) -> dict[str, Any] | None:
    """Return published numbers with ours beside them; None where a study has none.

    Args:
        published: the section of the study file, see `basecap.study.published`; numbers in percent.
        tests: the rows `recall.TestRow` of the study.
        train: training tasks of the study; a number that names none is of the only one, and on its own pattern.

    Returns:
        source, metric, and `rows`: architecture, train, test, `axis` (the cell; empty: the mean over cells),
        `published` and `value` as shares, `difference` (ours minus published), and whether our interval holds the
        published number (`within`); the last three None where there is nothing to compare.
    """
    if published is None:
        return None
    metric = published["metric"]
    rows = []
    for entry in published["values"]:
        own = entry.get("train") or _only(train)
        place = {"architecture": entry["architecture"], "train": own, "test": entry.get("test") or own}
        axis = {name: entry[name] for name in ("length", "pairs") if entry.get(name) is not None}
        value = entry["value"] / 100
        ours = _ours(tests, place, axis, metric)
        rows.append(
            place
            | {
                "axis": axis,
                "published": value,
                "value": ours["value"] if ours else None,
                "difference": ours["value"] - value if ours else None,
                "within": ours["low"] <= value <= ours["high"] if ours else None,
            }
        )
    return {"source": published["source"], "metric": metric, "rows": rows}


def _only(tasks: Sequence[str]) -> str | None:
    return tasks[0] if len(tasks) == 1 else None


def _ours(
    tests: Sequence[Mapping[str, Any]], place: Mapping[str, Any], axis: Mapping[str, float], metric: str
) -> dict[str, float] | None:
    """Return our interval of one published number."""
    for row in tests:
        if all(row[key] == value for key, value in place.items()):
            cells = [cell for cell in row["cells"] if cell["axis"] == axis]
            return (cells[0][metric] if cells else None) if axis else row[metric]
    return None

"""Rows of the page's tables: one per architecture, its seeds folded into it."""

from statistics import mean, median
from typing import Any

Study = dict[str, Any]


def at_lowest(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the gap of a row of `comparisons` at the lowest loss that both have seen, with its interval there."""
    along = row["along"]
    if along is None:
        return None
    return {"value": along["value"][0], **{end: along[end] and along[end][0] for end in ("low", "high")}}


def by_architecture(study: Study) -> list[dict[str, Any]]:
    """Return a row per architecture: what its runs cost together, and the runs themselves."""
    rows = []
    for name, runs in _grouped(study["runs"]).items():
        rates = [run["tokens_per_s"] for run in runs if run["tokens_per_s"] is not None]
        seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
        states = [run["status"] for run in runs]
        rows.append(
            {
                "name": name,
                "state": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
                "parameters": next((run["parameters"] for run in runs if run["parameters"] is not None), None),
                "tokens": max(run["tokens"] for run in runs),
                "tokens_per_s": median(rates) if rates else None,
                "seconds": sum(seconds) if seconds else None,
                "machines": list(dict.fromkeys(machine for run in runs for machine in run["machines"])),
                "runs": runs,
            }
        )
    return rows


def final_losses(study: Study) -> list[dict[str, Any]]:
    """Return the last evaluation point of each run, and the means over the runs of an architecture.

    The values are the training loss, the held-out loss, then the loss on each domain; None where there is none.
    """
    domains = [*study["train_domains"], *study["ood_domains"]]
    last = {(point["name"], point["seed"]): point for point in study["points"]}
    runs = [
        {key: point[key] for key in ("name", "seed", "tokens")}
        | {
            "losses": [
                point["training"],
                point["held_out"],
                *(point["domains"].get(domain, {}).get("loss") for domain in domains),
            ]
        }
        for point in last.values()
    ]
    return [
        {
            "name": name,
            "tokens": max(run["tokens"] for run in own),
            "means": [
                None if None in column else mean(column) for column in zip(*(run["losses"] for run in own), strict=True)
            ],
            "runs": own,
        }
        for name, own in _grouped(runs).items()
    ]


def without_nothing(content: Any) -> Any:
    """Return settings without those that are not set."""
    if isinstance(content, dict):
        return {key: without_nothing(value) for key, value in content.items() if value is not None}
    return [without_nothing(value) for value in content] if isinstance(content, list) else content


def _grouped(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found

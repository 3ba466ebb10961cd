"""The gap table for a terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.report.titles import titles
from basecap.report.words import gap_text, headline, interval_text, single_seed, unfinished

STYLES = {"keeps": "green", "degrades": "red", "undecided": "yellow"}


def terminal_table(results: dict[str, Any], paths: Sequence[Path]) -> Group:
    """Return what `rich` prints: per study, in `paths`, a line that sums up and a row per architecture."""
    named = zip(titles(results["studies"], paths), results["studies"], strict=True)
    return Group(*(part for title, study in named for part in (*_table(title, study), Text())))


def _table(title: str, study: dict[str, Any]) -> list[Table | Text]:
    table = Table(title=Text(f"{title}: gap to {study['reference']}, nats per token"), title_justify="left")
    table.box = None
    for column in ("architecture", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("gap", "interval", *study["ood_domains"]):
        table.add_column(Text(column), justify="right", overflow="fold")
    for row in study["comparisons"]:
        domains = {part["domain"]: part for part in row["domains"]}
        table.add_row(
            Text(row["name"]),
            Text(row["verdict"], style=STYLES[row["verdict"]]),
            gap_text(row["gap"]),
            interval_text(row["gap"]),
            *(gap_text(domains.get(domain)) for domain in study["ood_domains"]),
        )
    undecided: dict[str, list[str]] = {}
    for row in study["comparisons"]:
        if row["verdict"] == "undecided":
            undecided.setdefault(row["words"], []).append(row["name"])
    reasons = [Text(f"{', '.join(names)}: {words}.") for words, names in undecided.items()]
    failures = [
        Text(f"failed: {failure['name']} (seed {failure['seed']}): {failure['message']}", style="red")
        for failure in study["failures"]
    ]
    cautions = [Text(words, style="yellow") for words in (single_seed(study), unfinished(study)) if words]
    return [table, Text(headline(study)), *reasons, *cautions, *failures]

"""The gap table for a terminal."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.report.words import gap_text, headline

STYLES = {"keeps": "green", "degrades": "red", "undecided": "yellow"}


def terminal_table(results: dict[str, Any]) -> Group:
    """Return what `rich` prints: per study a line that sums up and a row per architecture."""
    return Group(*(part for study in results["studies"] for part in (*_table(study), Text())))


def _table(study: dict[str, Any]) -> list[Table | Text]:
    table = Table(title=Text(f"{study['name']}: gap to {study['reference']}"), title_justify="left", box=None)
    table.add_column("architecture")
    table.add_column("verdict")
    table.add_column("gap (nats per token)", justify="right")
    for domain in study["ood_domains"]:
        table.add_column(Text(domain), justify="right")
    table.add_column("why")
    for row in study["comparisons"]:
        domains = {part["domain"]: part for part in row["domains"]}
        table.add_row(
            Text(row["name"]),
            Text(row["verdict"], style=STYLES[row["verdict"]]),
            Text(gap_text(row["gap"])),
            *(Text(gap_text(domains.get(domain), interval=False)) for domain in study["ood_domains"]),
            Text(row["words"]),
        )
    failures = [
        Text(f"failed: {failure['name']} (seed {failure['seed']}): {failure['message']}", style="red")
        for failure in study["failures"]
    ]
    return [table, Text(headline(study)), *failures]

"""The table of verdicts for a terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.report.titles import titles
from basecap.report.words import (
    SIGNS,
    gap_text,
    headline,
    interval_text,
    rates_text,
    reasons,
    remarks,
    runs_text,
    trained_models_only,
    unfinished,
    worth_interval_text,
    worth_text,
)

STYLES = {"keeps": "green", "degrades": "red", "undecided": "yellow", "behind": "yellow", "none": ""}


def terminal_table(results: dict[str, Any], paths: Sequence[Path]) -> Group:
    """Return what `rich` prints: per study, in `paths`, a row per architecture, and what that says."""
    named = zip(titles(results["studies"], paths), results["studies"], strict=True)
    return Group(*(part for title, study in named for part in (*_study(title, study), Text())))


def _study(title: str, study: dict[str, Any]) -> list[Table | Text]:
    failures = [
        Text(f"failed: {failure['name']} (seed {failure['seed']}): {failure['message']}", style="red")
        for failure in study["failures"]
    ]
    said = (trained_models_only(study), unfinished(study), *remarks(study))
    cautions = [Text(words, style="yellow") for words in said if words]
    rates = [Text(words) for words in [rates_text(study)] if words]
    why = [Text(f"- {reason}") for reason in reasons(study)]
    return [_table(title, study), Text(headline(study), style="bold"), *why, *rates, *cautions, *failures]


def _table(title: str, study: dict[str, Any]) -> Table:
    signs = " (✓ keeps, ✗ degrades, ? undecided)" if study["ood_domains"] else ""
    table = Table(title=Text(f"{title}: gap to {study['reference']}, nats per token{signs}"), title_justify="left")
    table.box = None
    domains = study["ood_domains"] or study["train_domains"]
    for column in ("architecture", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("gap", "interval", "as if trained on", "weighted gap", "runs", *domains):
        table.add_column(Text(column), justify="right", overflow="fold")
    for row in study["comparisons"]:
        by_domain = {part["domain"]: part for part in row["domains"]}
        worth = f"{worth_text(row['gap'])} ({worth_interval_text(row['gap'])})" if row["gap"] else "–"
        table.add_row(
            Text(row["name"]),
            Text("–" if row["verdict"] == "none" else row["verdict"], style=STYLES[row["verdict"]]),
            gap_text(row["gap"]),
            interval_text(row["gap"]),
            worth,
            _signed(row["weighted"]),
            runs_text(row),
            *(_signed(by_domain.get(domain)) for domain in domains),
        )
    return table


def _signed(found: dict[str, Any] | None) -> Text:
    """Return a gap with the sign of its verdict: ✓ keeps, ✗ degrades, ? undecided."""
    if found is None or found["verdict"] == "none":
        return Text(gap_text(found))
    return Text(f"{gap_text(found)} {SIGNS[found['verdict']]}", style=STYLES[found["verdict"]])

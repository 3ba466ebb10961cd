"""What a report says on a terminal: the table of each study and its words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from basecap.report.kinds import KINDS
from basecap.report.titles import titles


def terminal_table(results: dict[str, Any], paths: Sequence[Path]) -> Group:
    """Return what `rich` prints: per study, in `paths`, its table, and what that says."""
    named = zip(titles(results["studies"], paths), results["studies"], strict=True)
    return Group(*(part for title, study in named for part in (*_study(title, study), Text())))


def _study(title: str, study: dict[str, Any]) -> list[Table | Text]:
    kind = KINDS[study["kind"]]
    said = kind.say(study)
    failures = [
        Text(f"failed: {failure['name']} (seed {failure['seed']}): {failure['message']}", style="red")
        for failure in study["failures"]
    ]
    return [
        kind.table(title, study),
        Text(said.headline, style="bold"),
        *(Text(f"- {reason}") for reason in said.reasons),
        *([Text(said.rates)] if said.rates else []),
        *(Text(words, style="yellow") for words in said.cautions),
        *failures,
    ]

"""The kinds of studies that a report can show: all stand on one page in one way, each with its own parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from basecap.report.charts import Charts, task_charts, text_charts
from basecap.report.recall_words import recall_cautions, recall_headline, recall_rates, recall_reasons
from basecap.report.tables import recall_table, verdict_table
from basecap.report.words import asked, headline, rates_text, reasons, remarks, trained_models_only, unfinished

Study = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Said:
    """A study in words: its question, a headline, reasons, what must not be overlooked, the learning rates it chose."""

    headline: str
    reasons: list[str]
    cautions: list[str]
    rates: str
    asked: str = ""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What differs between kinds of studies.

    Attributes:
        template: the part of the page below headline and failures.
        charts: draws every figure.
        table: for the terminal, of a title and a study.
        say: the study in words.
    """

    template: str
    charts: Callable[[Study], Charts]
    table: Callable[[str, Study], Table]
    say: Callable[[Study], Said]


def _text(study: Study) -> Said:
    cautions = [trained_models_only(study), unfinished(study), *remarks(study)]
    return Said(
        headline=headline(study),
        reasons=reasons(study),
        cautions=[words for words in cautions if words],
        rates=rates_text(study),
        asked=asked(study),
    )


def _tasks(study: Study) -> Said:
    return Said(
        headline=recall_headline(study),
        reasons=recall_reasons(study),
        cautions=recall_cautions(study),
        rates=recall_rates(study),
    )


#: By `kind` of a study in results.json.
KINDS = {
    "text": Kind(template="text.html", charts=text_charts, table=verdict_table, say=_text),
    "tasks": Kind(template="tasks.html", charts=task_charts, table=recall_table, say=_tasks),
}

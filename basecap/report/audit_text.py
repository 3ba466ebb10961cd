"""Verdicts beside the audit of each architecture: whether it sees the past, weighs it by content, and can select."""

from dataclasses import dataclass

from basecap.analysis.joined import Joined, gap_of
from basecap.analysis.results import TextResults
from basecap.analysis.rows import CopyingShares, Gap, Verdict
from basecap.analysis.text.audits import AuditRow, audit_rows, selection_of
from basecap.records.audits import HIGH, LOW, related_words, seen_words
from basecap.report import figures
from basecap.report.text_summary import VERBS, listed

#: Verdict -> whether it is expected of an architecture that can select; other verdicts are neither.
EXPECTED = {"keeps": True, "degrades": False}


@dataclass(frozen=True, kw_only=True)
class AuditedRow:
    """The audit of an architecture beside its gap; the reference and rows without a gap have no `gap`."""

    audit: AuditRow
    verdict: Verdict
    gap: Gap | None
    copying: CopyingShares | None
    words: str


def audited_rows(study: TextResults) -> list[AuditedRow]:
    """Return a row for each architecture that was audited."""
    compared = {row.name: row for row in study.comparisons}
    rows = []
    for found in audit_rows(study):
        row = compared.get(found.name)
        verdict: Verdict = row.verdict if row else "none"
        shares = study.maturity.copying if study.maturity and found.name == study.reference else None
        rows.append(
            AuditedRow(
                audit=found,
                verdict=verdict,
                gap=row.gap if row else None,
                copying=row.copying if row else shares,
                words=audit_words(found, verdict),
            )
        )
    return rows


def audit_words(found: AuditRow, verdict: Verdict) -> str:
    """Return a verdict with what the audit says of it, as "degrades, and cannot select: 0.21 of 1"."""
    own = found.trained
    parts = [] if own.visibility >= HIGH else [seen_words(own.visibility)]
    if own.relation is not None and own.relation < HIGH:
        parts.append(f"{related_words(own.relation)} ({own.relation:.2f})")
    text = listed([*parts, _selects(found)])
    if verdict not in VERBS:
        return text
    as_expected = EXPECTED.get(verdict) in (None, own.chosen >= HIGH)
    return f"{VERBS[verdict][0]}, {'and' if as_expected else 'but'} {text}"


def _selects(found: AuditRow) -> str:
    own, form = found.trained, found.form
    if own.chosen >= HIGH:
        return f"can select: {own.selection:.2f} of 1"
    if form.chosen >= HIGH:
        how = "hardly" if own.chosen < LOW else "only partly"
        return f"{how} selects, though its form can: {own.selection:.2f} and {form.selection:.2f} of 1"
    return f"{'cannot' if own.chosen < LOW else 'can only partly'} select: {own.selection:.2f} of 1"


def selection_chart(study: TextResults) -> figures.Spec | None:
    """Draw the gap against selection; None where fewer than two architectures have both."""
    gap, selection = gap_of(study, study.name), selection_of(study, "audit of the trained runs")
    if gap is None or selection is None:
        return None
    return figures.gap_against(
        Joined(reference=study.reference, names=study.names, measures=[], correlations=[]), gap, selection
    )


def share_text(value: float | None) -> str:
    """Return a share of an audit, a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"

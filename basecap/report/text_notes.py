"""What a reader of the table of verdicts needs to know: terms and what they mean."""

from collections.abc import Sequence

from basecap.analysis.results import TextResults
from basecap.analysis.rows import Row
from basecap.analysis.text.draws import FEWEST_DOCUMENTS
from basecap.analysis.text.noise import FEWEST_SPLIT
from basecap.report.text_summary import listed


def notes(study: TextResults) -> list[tuple[str, str]]:
    """Return what a reader of the table needs to know as (term, what it means); none where no row has a gap."""
    rows = [row for row in study.comparisons if row.gap is not None]
    if not rows:
        return []
    return [
        *(_verdicts(study, rows[0]) if study.ood_domains else _alike(study, rows[0])),
        ("Intervals", _intervals(study, rows)),
        (
            "As if trained on",
            f"80 % means: {study.reference} itself is that good after 80 % of its tokens. The interval "
            f"includes the errors of the gap and of how fast the loss of {study.reference} falls.",
        ),
        ("Weighted gap", "domains count by how precisely they are measured, with the same weights in every row."),
        ("Trained range", _range(study)),
    ]


def _alike(study: TextResults, row: Row) -> list[tuple[str, str]]:
    found = row.gap
    if found is None or found.tolerance is None:
        return []
    text = (
        f"the whole interval lies within the tolerance, {found.tolerance:.3f} nats above 0 or below: what "
        f'{100 * study.cost:g} % of the tokens of {study.reference} are worth. "No measurable difference" says less: '
        "the interval includes 0, and larger differences too."
    )
    return [("Alike", text)]


def _verdicts(study: TextResults, row: Row) -> list[tuple[str, str]]:
    reference, found = study.reference, row.gap
    if found is None or found.tolerance is None:
        return [("Tolerance", f"none: the loss of {reference} on the unseen domains does not fall while it trains.")]
    some = [part for part in row.domains if part.tolerance is not None]
    differs = ", ".join(f"{part.domain} {part.tolerance:.3f}" for part in some)
    measured = found.split is not None
    check = f"not measurable: fewer than {FEWEST_SPLIT} runs of {reference}."
    if measured:
        check = f"two groups of {reference}'s own runs differ by up to {found.split:.3f} nats."
    return [
        (
            "Tolerance",
            f"a gap counts as kept if it costs less than {100 * study.cost:g} % of the tokens of {reference}: "
            f"{found.tolerance:.3f} nats here, standard error {found.tolerance_error:.3f} ({differs}).",
        ),
        (
            "Keeps",
            "the interval ends below the tolerance also when the tolerance's own error is counted: that of \"as if "
            f'trained on" lies above {100 * (1 - study.cost):g} %.',
        ),
        (
            "Degrades",
            f"the interval begins above 0, and the gap itself exceeds the tolerance"
            f"{'; it exceeds the A-A range, too' if measured else ''}.",
        ),
        (
            "Early",
            f"too early to say: {reference} is not past its transition, where it learns to copy from its context, or "
            "the gap drifts towards the tolerance so fast that it would cross it over another such range of losses.",
        ),
        ("Maturity unknown", f"nothing tells whether {reference} is past its transition."),
        ("Undecided", "none of these, or nothing tells whether the gap stands still."),
        ("Behind", "not trained far enough to be compared; no gap is measured."),
        ("A-A range", check),
    ]


def _intervals(study: TextResults, rows: Sequence[Row]) -> str:
    text = (
        f"in each column, the intervals of all rows hold together with {100 * study.confidence:g} % probability; "
        f'only those marked "this row alone" hold for a single row. {_looks(study)}'
    )
    few = study.few_clusters
    if any(row.conditional for row in rows):
        text += "They hold for these trained models only. "
    elif not few:
        text += "They include what other documents and other seeds would change."
    if few:
        text += (
            f"They hold for these sources only: the documents of {listed(few)} come from fewer than "
            f"{FEWEST_DOCUMENTS} clusters."
        )
    return text.strip()


def _looks(study: TextResults) -> str:
    """Return a sentence, with " " after it, about a study whose table was looked at more than once, else ""."""
    if (added := study.added) is not None:
        return (
            f"Over all {added.tables + 1} tables that were made of this study they hold with at least "
            f"{100 * added.confidence:g} %. "
        )
    if (looks := study.looks) is None:
        return ""
    counts = listed(map(str, looks.looks))
    return f"Looked at after {counts} of at most {looks.most} seeds; intervals hold over all looks together. "


def _range(study: TextResults) -> str:
    return (
        f"the losses over which gaps are averaged. It begins where {study.reference} is after "
        f"{100 * study.share:g} % of its tokens (or at the loss of a bigram model, if that is lower) and ends at the "
        "higher of the two final losses."
    )

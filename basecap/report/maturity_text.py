"""Maturity in words: what is known of the reference's transition, and where gaps go."""

from basecap.analysis.results import TextResults
from basecap.analysis.rows import CopyingShares, Gap
from basecap.analysis.text.reasons import rounded

#: Where a gap goes -> what that means for its verdict.
STATES = {
    "settled": "another such range keeps the verdict",
    "drifts": "another such range changes the verdict",
    "open": "another such range may change the verdict",
}


def maturity_text(study: TextResults) -> str:
    """Return a sentence or two: the state of the reference, and where its held-out loss rises."""
    found = study.maturity
    if found is None:
        return ""
    kinds = {"mature": "Mature", "early": "Too early", "maturity unknown": "Maturity unknown"}
    text = f"{kinds[found.state]}: {found.words}."
    return f"{text} {rising_text(study)}".strip()


def rising_text(study: TextResults) -> str:
    """Return a sentence about a reference whose held-out loss rises again, "" where it falls to the end."""
    if study.maturity is None or study.maturity.rises is None:
        return ""
    return (
        f"The held-out loss of {study.reference} rises after {rounded(study.maturity.rises)} tokens, where it overfits "
        "its training text: the trained range ends there."
    )


def copies_text(copying: CopyingShares | None) -> str:
    """Return the shares that models copy as "12 … 28 %", a dash for one that was not measured."""
    if copying is None or copying.end is None:
        return "–"
    begin, end = ("–" if share is None else f"{round(100 * share, 1) + 0.0:.1f}" for share in vars(copying).values())
    return f"{begin} … {end} %"


def direction_text(found: Gap) -> str:
    """Return where a gap goes: up, down or not measurably, and what that means for its verdict."""
    where = found.direction
    if where is None:
        return "–"
    moves = "rises" if where.drift.low > 0 else "falls" if where.drift.high < 0 else "no measurable drift"
    return moves if where.state is None else f"{moves}; {STATES[where.state]}"

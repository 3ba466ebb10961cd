"""Positive controls in words: does a study see a loss of capability where there is one?"""

from basecap.analysis.results import TextResults
from basecap.analysis.rows import Row
from basecap.report.text_summary import gap_text, interval_text

UNSEEN = "so nothing shows that this study would see a loss of capability"


def controls_text(study: TextResults) -> list[str]:
    """Return a sentence or two for each control of a study that has runs: whether its gap lies above the tolerance.

    Controls are worse on unseen domains; nothing is said of them where a study trains on every domain.
    """
    if not study.ood_domains:
        return []
    young = study.maturity is not None and study.maturity.state != "mature"
    fails = f"the control fails{' at this age' if young else ''}, {UNSEEN}"
    return [f"Control: {_found(row, fails)}." for row in study.comparisons if row.name in study.controls]


def _found(row: Row, fails: str) -> str:
    gap = row.gap
    if gap is None:
        return f"{row.name}, which must be worse, could not be compared ({row.words}), {UNSEEN}"
    measured = f"{gap_text(gap)} nats ({interval_text(gap)})"
    if gap.tolerance is None:
        return f"{row.name}, which must be worse, has a gap of {measured} and nothing to judge it by, {UNSEEN}"
    if gap.low > gap.tolerance:
        return (
            f"{row.name} must be worse. Its gap of {measured} lies above the tolerance of {gap.tolerance:.3f}, as it "
            "has to: this study sees a loss of capability of that size"
        )
    return (
        f"{row.name} must be worse, but its gap of {measured} does not lie above the tolerance of {gap.tolerance:.3f}: "
        f"{fails}"
    )

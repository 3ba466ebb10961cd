"""Where gaps come from, in words: the domain, and the class of tokens, that carries most of a gap."""

from basecap.analysis.results import TextResults
from basecap.analysis.rows import GapPart, Row
from basecap.analysis.text.maturity import PAST
from basecap.records.token_classes import COPIED, MISLED, NEW
from basecap.report.text_summary import gap_text, listed

#: Class of tokens -> which tokens these are.
TOKENS = {
    COPIED: "tokens that a copy from the context predicts",
    MISLED: "tokens where a copy from the context would be wrong",
    NEW: "tokens without a precedent in the context",
}
#: Class of tokens -> what it means that a higher loss lies there, and a lower one.
MEANINGS = {
    COPIED: ("copies less", "copies more"),
    MISLED: ("is misled more", "is misled less"),
    NEW: ("generalises worse", "generalises better"),
}
#: The same while the reference learns to copy: who copies more then may only have learned it earlier.
EARLY = MEANINGS | {COPIED: ("copies later", "copies earlier")}
#: A domain or a class carries most of a gap from this share on of all parts' sizes together.
MOST = 2 / 3


def carried_text(study: TextResults) -> str:
    """Return a sentence on the gaps that lie mostly in one unseen domain, "" where there are none."""
    found = [f"{row.name} ({words})" for row in study.comparisons if study.ood_domains and (words := _carried(row))]
    return f"One domain carries most of the gap of {listed(found)}." if found else ""


def _carried(row: Row) -> str:
    """Return the gaps of a row by domain, first the one that carries most of it; "" where none surely does."""
    if row.gap is None or len(row.domains) < 2:
        return ""
    first, *others = sorted(row.domains, key=lambda part: -abs(part.value))
    same_side = first.value * row.gap.value > 0 and (first.low > 0 or first.high < 0)
    if not same_side or abs(first.value) < MOST * sum(abs(part.value) for part in row.domains):
        return ""
    return f"{first.domain} {gap_text(first)}; {', '.join(f'{part.domain} {gap_text(part)}' for part in others)}"


def origin_text(row: Row, study: TextResults) -> str:
    """Return a sentence on the class that carries most of a row's gap, "" where none does or the gap may be 0."""
    if row.gap is None or not row.parts:
        return ""
    largest = max(row.parts, key=lambda part: abs(part.value))
    size = sum(abs(part.value) for part in row.parts)
    # Without an interval the gap decides alone whether there is anything to explain.
    certain = largest.low is None or largest.high is None or largest.low > 0 or largest.high < 0
    if largest.share is None or largest.share <= 0 or abs(largest.value) < MOST * size or not certain:
        return ""
    mature = study.maturity is None or study.maturity.state == "mature"
    worse, better = (MEANINGS if mature else EARLY)[largest.name]
    if mature and largest.name == COPIED and row.copying and row.copying.end is not None and row.copying.end < PAST:
        worse = f"{worse} so far"  # it is not past its own transition
    label = single_run_text(largest)
    return (
        f"{worse if largest.value > 0 else better}: {TOKENS[largest.name]} contribute {gap_text(largest)} to the gap "
        f"of {gap_text(row.gap)} nats{f' ({label})' if label else ''}"
    )


def single_run_text(part: GapPart) -> str:
    """Return that a part has no interval, as an architecture was trained once; "" where it has one."""
    return "one run" if part.low is None else ""

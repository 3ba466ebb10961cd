"""Verdicts in words: why a row is what it is, and what would change that."""

from collections.abc import Sequence
from dataclasses import replace

from basecap.analysis.rows import CopyingShares, Gap, Maturity, Row
from basecap.analysis.text.draws import FEWEST_DOCUMENTS, FEWEST_OF_A_DOMAIN
from basecap.analysis.text.gap import FEWEST_POINTS
from basecap.analysis.text.power import NORMAL
from basecap.names import TEST
from basecap.system.progress import duration

OTHER_DOCUMENTS = "it was evaluated on other documents than the reference"
NO_TRAINING_LOSS = "no training loss was recorded"
FEW_DOCUMENTS = (
    f"fewer than {FEWEST_DOCUMENTS} held-out documents, or fewer than {FEWEST_OF_A_DOMAIN} of one training domain: "
    "no interval can be trusted"
)
#: What is said at the scale `TEST` in place of reasons and warnings.
TEST_SCALE = f"Scale {TEST} shows that the study runs; it is too small for verdicts."
LOST = "the trained range is too narrow for an interval: train longer"
#: How the reason begins where nothing can be compared because of the reference.
REFERENCE = "the reference"
#: The same where it has not trained enough.
UNTRAINED = f"{REFERENCE} has no trained range"


def no_runs(reference: str | None, waiting: bool, failed: bool) -> str:
    """Say that there is nothing to compare: of the reference by name, or of a row or several (None)."""
    who = f"{REFERENCE} {reference} " if reference else ""
    if who and waiting:
        return f"{who}has not run yet"
    if failed:
        return f"{who}failed before an evaluation point with finite losses"
    return f"{who}has no evaluation point with finite losses" if who else "no evaluation point with finite losses"


def few_points(who: str, count: int, rises: float | None = None, *, entered: bool = False) -> str:
    """Say that a curve has too few points; its held-out loss rises after `rises` tokens, where it ends.

    One that has just `entered` the trained range gets more points by longer training, too.
    """
    points = "point" if count == 1 else "points"
    if rises is not None:
        return (
            f"{who} has {count} evaluation {points} near the trained range before its held-out loss rises, after "
            f"{rounded(rises)} tokens, and needs {FEWEST_POINTS}: train on more text, or evaluate more often "
            "(train.eval_every, with wsd train.branches)"
        )
    return (
        f"{who} has {count} evaluation {points} near the trained range and needs {FEWEST_POINTS}: "
        f"{'train longer, or ' if entered else ''}evaluate more often (train.eval_every, with wsd train.branches)"
    )


def untrained(reference: str, low: float, bigram: float | None, more: float | None) -> str:
    """Say why the reference, whose loss ends at `low`, has no trained range."""
    if bigram is not None and low >= bigram:
        return f"{UNTRAINED}: {reference} ends at {low:.3f} nats, a bigram model at {bigram:.3f}; {_train(more)}"
    return f"{UNTRAINED}: the loss of {reference} no longer falls; train it on other data or with another train.lr"


def short(tokens: float, furthest: float) -> str:
    """Say that a run did not get to its end."""
    return f"it ends after {tokens:,.0f} of {furthest:,.0f} tokens"


def twin(seed: int) -> str:
    """Say that a run is another one under a second name."""
    return f"all its losses are equal to those of seed {seed}: both are one run"


def diverged(loss: str, last: float, middle: float, share: float) -> str:
    """Say that a run of the reference diverged by its `loss`, "held-out" or "training"."""
    return (
        f"it diverged: its {loss} loss ends at {last:.3f}, above the {middle:.3f} of the median run after "
        f"{100 * share:g} % of the tokens"
    )


def outside(loss: str, last: float, high: float) -> str:
    """Say that one run of several did not get to the trained range of `loss`, "held-out" or "training"."""
    return f"its {loss} loss ends at {last:.3f}, above the trained range, which begins at {high:.3f}"


def behind(loss: str, best: float, high: float, more: float | None, rises: float | None = None) -> str:
    """Say how far an architecture is from the trained range of `loss`, "held-out" or "training".

    After `rises` tokens its held-out loss rises: longer training on the same text takes it no further.
    """
    if rises is not None:
        return (
            f"its {loss} loss is {best:.3f} at its lowest and rises after {rounded(rises)} tokens, the trained range "
            f"begins at {high:.3f}; train on more text, or change train.lr or its size"
        )
    return f"its {loss} loss ends at {best:.3f}, the trained range begins at {high:.3f}; {_train(more)}"


def _train(more: float | None) -> str:
    if more is None:
        return "at the pace of its second half it will not get there: change train.lr, train.tokens or its size"
    return (
        f"train about {rounded(more)} more tokens at the pace of its second half, up to four times as many if that "
        "slows down, as it usually does"
    )


#: A smaller share of copying is none in the digits that are shown.
LEAST_COPIED = 5e-4
#: Why nothing is known of the reference's maturity.
NO_COPYING = (
    "the records do not tell whether the reference has learned to copy from its context: evaluate copying at every "
    "evaluation point (evals: [domain-loss, copying: {at: every}])"
)


def no_copying_at(tokens: float) -> str:
    """Say that copying was not measured where the trained range begins."""
    return (
        f"copying was not measured near {rounded(tokens)} tokens, where the trained range begins, so nothing tells "
        "whether the reference was past its transition there: evaluate it at every evaluation point"
    )


def no_transition(share: float, tokens: float) -> str:
    """Say that the reference does not copy: it may even be worse at the second reading."""
    copied = _percent(share) if share >= LEAST_COPIED else "nothing"
    return (
        f"the reference shows no transition: it copies {copied} after {rounded(tokens)} tokens; train longer, until it "
        "copies from its context"
    )


def mature(copying: CopyingShares) -> str:
    """Say that the reference is past its transition."""
    assert copying.begin is not None and copying.end is not None
    return (
        f"the reference is past its transition: it copies {_percent(copying.begin)} where the trained range begins, "
        f"{_percent(copying.end)} at its end"
    )


def late_runs(late: int, runs: int, past: float) -> str:
    """Say that some runs of the reference do not copy, while they do on average."""
    do = "copies" if late == 1 else "copy"
    return f"train longer: {late} of {runs} runs of the reference {do} less than {_percent(past)} at the end"


def immature(copying: CopyingShares, past: float, more: float | None) -> str:
    """Say that the reference learns to copy within the trained range, or has only started to."""
    assert copying.end is not None
    train = "train longer" if more is None else f"train about {rounded(more)} more tokens"
    if copying.end < past or copying.begin is None:
        return f"{train}: the reference has started to copy ({_percent(copying.end)} at its end)"
    return (
        f"{train}: the reference learns to copy within the trained range ({_percent(copying.begin)} where it begins, "
        f"{_percent(copying.end)} at its end)"
    )


def _percent(share: float) -> str:
    digits = 0 if share >= 0.1 else 1
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def too_early(row: Row, maturity: Maturity) -> Row:
    """Return a row of a table whose reference is not mature: that comes before whatever else it lacks."""
    if row.verdict in ("none", "early"):
        return row
    return replace(row, verdict="early", words=f"too early; {maturity.words}; {row.words}")


def _drifts(row: Row) -> str:
    """Say that a gap drifts towards another verdict."""
    assert row.gap is not None and row.gap.direction is not None and row.gap.tolerance is not None
    found, where = row.gap.direction, "out of" if row.gap.value < row.gap.tolerance else "into"
    return (
        f"too early: the gap drifts {where} the tolerance of {row.gap.tolerance:.3f} nats, by {found.drift.value:+.3f} "
        f"over half of the trained range; over another such range it would be {found.next.value:+.3f}; train longer"
    )


def _open(found: Gap) -> str:
    assert found.direction is not None
    after = found.direction.next
    return (
        f"the interval would decide, but nothing tells whether the gap stands still: over another such range it is "
        f"{after.value:+.3f} ({after.low:+.3f} … {after.high:+.3f})"
    )


def rounded(count: float) -> str:
    """Return a count with two digits, such as "52 million"."""
    rounded = float(f"{count:.1e}")
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if rounded >= size:
            return f"{rounded / size:g} {name}"
    return f"{rounded:,.0f}"


def of(row: Row, maturity: Maturity) -> str:
    """Return the words of a row that has a gap."""
    assert row.gap is not None
    found = row.gap
    if row.verdict == "none":
        return _difference(found)
    if row.verdict == "maturity unknown":
        return maturity.words
    if row.verdict == "early":
        return f"too early; {maturity.words}" if maturity.state == "early" else _drifts(row)
    if row.verdict == "keeps":
        text = _keeps(found)
        worse = ", ".join(part.domain for part in row.domains if part.low > 0)
        return f"{text}; measurably worse on {worse}" if worse else text
    if row.verdict == "degrades":
        return "worse out of domain than the reference at equal pre-training loss"
    return f"{undecided(found)}; {_more(row, overfits=maturity.rises is not None)}"


def alike(found: Gap) -> bool:
    """Return whether the whole interval lies within the tolerance, above 0 and below it.

    A test of equivalence (Schuirmann, 1987) at the level of the interval. The tolerance's own error is counted.
    """
    if found.tolerance is None or found.tolerance_error is None:
        return False
    limit = found.tolerance - NORMAL * found.tolerance_error
    return -limit < found.low and found.high < limit


def _difference(found: Gap) -> str:
    """Say what the gap of a study without an unseen domain is: there is no verdict."""
    within = alike(found)
    if found.low <= 0 <= found.high:
        if within:
            return f"alike: any difference is smaller than the tolerance of {found.tolerance:.3f} nats"
        return "no measurable difference"
    text = f"{'higher' if found.low > 0 else 'lower'} held-out loss at equal training loss"
    return f"{text}, by less than the tolerance of {found.tolerance:.3f} nats" if within else text


def _keeps(found: Gap) -> str:
    if found.high < 0:
        return "better out of domain than the reference at equal pre-training loss"
    if found.low > 0:
        return f"measurably worse, by less than the tolerance of {found.tolerance:.3f} nats"
    return f"any gap is smaller than the tolerance of {found.tolerance:.3f} nats"


def undecided(found: Gap) -> str:
    """Say why a gap is undecided."""
    if found.tolerance is None:
        return "the reference's loss on unseen domains does not fall while it trains"
    if found.direction is not None and found.direction.state == "open":
        return _open(found)
    if found.high < found.tolerance:
        return (
            f"the interval ends below the tolerance of {found.tolerance:.3f} nats, but no further below than the "
            f"tolerance itself is uncertain (standard error {found.tolerance_error:.3f})"
        )
    if found.low > 0 and found.value <= found.tolerance:
        return f"worse, but the estimate lies below the tolerance of {found.tolerance:.3f} nats"
    if found.low > 0:
        return f"worse, but by less than two groups of the reference's own runs differ ({found.split:.3f} nats)"
    return f"the interval includes both 0 and the tolerance of {found.tolerance:.3f} nats"


def _more(row: Row, *, overfits: bool) -> str:
    if row.gap is not None and row.gap.tolerance is None:
        return "train on more text" if overfits else "train longer"
    if row.conditional:
        return "train at least three seeds"
    if row.more is None:
        return "more seeds alone will not decide it: use more held-out documents or train longer"
    one = row.more.runs == 1
    each = "one more run of it and of the reference has" if one else f"{row.more.runs} more runs of each have"
    took = "" if row.more.seconds is None else f" ({duration(row.more.seconds)} of training here)"
    return f"{each} an even chance to decide it{took}"


def with_cautions(row: Row, few_clusters: Sequence[str]) -> Row:
    """Return the row with what its words must not hide."""
    cautions = []
    if row.gap is not None and row.conditional:
        cautions.append("the interval holds for these trained models only")
    elif row.gap is not None and len(row.seeds) == 1:
        cautions.append("with one run, how much it varies from seed to seed is taken from the others")
    if row.rises is not None:
        cautions.append(f"its held-out loss rises after {rounded(row.rises)} tokens, where its curves end")
    if row.gap is not None and few_clusters:
        cautions.append(f"the interval is conditional on these sources (few clusters: {', '.join(few_clusters)})")
    if row.gap is not None and row.left_out:
        cautions.append(f"left out: {'; '.join(f'seed {run.seed} ({run.why})' for run in row.left_out)}")
    return replace(row, words="; ".join([row.words, *cautions])) if cautions else row

"""The part of a report that joins studies: one table over architectures, the gap against costs, correlations."""

from collections.abc import Iterator, Sequence

from basecap.analysis.correlations import FEWEST, Correlation, Measure, gap_beside
from basecap.analysis.joined import COSTS, Joined
from basecap.analysis.rows import Estimate, Interval
from basecap.report import figures
from basecap.report.export import Sheet
from basecap.report.text_summary import gap_text, size_text


def joined_charts(joined: Joined) -> dict[str, figures.Spec]:
    """Return the charts of the gap against each cost, then each score that it correlates with, by name."""
    gaps, scores, costs = (
        [measure for measure in joined.measures if measure.kind == kind] for kind in ("gap", "score", "cost")
    )
    known = {found.other for found in joined.correlations if found.value is not None}
    others = [*costs, *(score for score in scores if f"{score.name}, {score.source}" in known)]
    charts = {
        f"gap-against-{number}-{other.name}": figures.gap_against(joined, gap_beside(gaps, other), other)
        for number, other in enumerate(others if gaps else [], start=1)
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def charted(joined: Joined) -> list[str]:
    """Return the architectures that charts of the join can show: those with a gap and with another number."""
    gaps = {name for measure in joined.measures if measure.kind == "gap" for name in measure.values}
    others = {name for measure in joined.measures if measure.kind != "gap" for name in measure.values}
    return [name for name in joined.names if name in gaps & others]


def measured(joined: Joined) -> list[str]:
    """Return the architectures with any number."""
    return [name for name in joined.names if any(name in measure.values for measure in joined.measures)]


def cell_text(measure: Measure, found: Estimate | None) -> str:
    """Return a number of the joined table, rounded as its kind is."""
    if found is None:
        return "–"
    if measure.kind == "gap":
        return gap_text(found)
    if measure.unit == "bytes":
        return size_text(found.value)
    if measure.kind == "cost":
        return f"{found.value:,.0f}" if found.value >= 1000 else f"{found.value:,.4g}"
    if measure.unit in ("accuracy", "accuracy lost", "share"):
        return f"{round(100 * found.value, 1) + 0.0:.1f} %"
    return f"{found.value:.4g}"


def ends_text(measure: Measure, found: Estimate | None) -> str:
    """Return the interval of a number in the joined table, "" without one."""
    if found is None or found.low is None or found.high is None:
        return ""
    low, high = (cell_text(measure, Estimate(value=end, low=None, high=None)) for end in (found.low, found.high))
    return f"{low} … {high}"


def joined_sentences(joined: Joined) -> list[str]:
    """Return the correlations in words, a sentence each; none if there are only gaps and costs."""
    if all(measure.kind != "gap" for measure in joined.measures):
        return ["No study has a gap to relate other numbers to; the sections of the studies say why."]
    if not joined.correlations:
        return []
    sentences = [sentence for found in joined.correlations for sentence in _correlation(found)]
    few = [found.other for found in joined.correlations if found.architectures < FEWEST]
    if len(few) == len(joined.correlations) and not sentences:
        most = max(found.architectures for found in joined.correlations)
        here = {0: "none has", 1: "1 has"}.get(most, f"{most} have")
        return [
            "Which evaluations go with the gap is not known yet: a correlation needs a gap and the evaluation of "
            f"{FEWEST} or more architectures, and {here} both; train more architectures, or join studies "
            "(basecap report DIR DIR --out DIR)."
        ]
    if few:
        sentences.append(
            f"Whether these go with the gap is not known, as fewer than {FEWEST} architectures have both: "
            f"{'; '.join(few)}."
        )
    return sentences


def _correlation(found: Correlation) -> Iterator[str]:
    """Yield a sentence on the correlation over architectures, then one on that within them."""
    if found.value is not None:
        over = f"rank correlation {_correlation_text(found.value, f'{found.architectures} architectures')}"
        yield f"Gap and {found.other}, over architectures: {over}; {_relation(found.value)}."
    if found.within is not None:
        over = f"correlation {_correlation_text(found.within, f'{found.runs} runs')}"
        yield f"Gap and {found.other}, over runs of the same architecture: {over}; {_relation(found.within)}."


def _correlation_text(found: Interval, what: str) -> str:
    return f"{found.value:+.2f} over {what} (95\u00a0% interval {found.low:+.2f} to {found.high:+.2f})"


def _relation(found: Interval) -> str:
    """Return what the interval of a correlation says, the end of a sentence."""
    if found.low <= 0 <= found.high:
        return "as this includes 0, no relation is shown"
    return f"a higher value goes with a {'larger' if found.value > 0 else 'smaller'} gap"


def front_sentences(joined: Joined) -> list[str]:
    """Return the Pareto front of the gap and each cost that has a chart, a sentence each."""
    gaps, costs = ([measure for measure in joined.measures if measure.kind == kind] for kind in ("gap", "cost"))
    return [
        f"Gap against {cost.name} ({cost.source}): {', '.join(figures.pareto_front(gap, cost))}."
        for cost in costs
        for gap in gaps[:1]
        if figures.compared(gap, cost)
    ]


def joined_sheets(joined: Joined) -> Iterator[Sheet]:
    """Yield the tables of the join: every number by architecture, and the correlations."""
    yield Sheet(
        name="joined",
        columns=[
            "architecture",
            *(f"{measure.name}, {measure.unit} ({measure.source})" for measure in joined.measures),
        ],
        rows=[[name, *(measure.values.get(name) for measure in joined.measures)] for name in measured(joined)],
    )
    if joined.correlations:
        yield Sheet(
            name="correlations",
            columns=["gap", "other", "architectures", "rank correlation", "runs", "correlation within architectures"],
            rows=[
                [found.gap, found.other, found.architectures, found.value, found.runs, found.within]
                for found in joined.correlations
            ],
        )


def missing_costs(joined: Joined) -> Sequence[str]:
    """Return the names of costs that the charts lack."""
    known = {measure.name for measure in joined.measures if measure.kind == "cost"}
    return [name for name, _, _ in COSTS.values() if name not in known]

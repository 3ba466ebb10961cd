"""Audits beside verdicts: only where they were measured."""

from basecap.analysis.joined import join
from basecap.analysis.results import EvaluationResults, EvaluationRow
from basecap.records.audits import untrained
from basecap.report.audit_text import audited_rows, selection_chart
from basecap.report.export import sheets
from basecap.report.figures import has_layers
from tests.report.made_up import row, study, without_gap

#: Visibility, relation, selection and null of layers: all three, none can select, a window, one that was not asked.
FULL, LINEAR, WINDOW, IDLE = (1.0, 0.9, 0.98, 0.01), (1.0, 0.9, 0.21, 0.02), (0.24, 0.9, 0.45, 0.01), (1, 0.5, 0.1, 0)


def audit(**layers):
    """Return the evaluation with the layers of each architecture, (untrained, trained), in one run."""
    rows = [
        EvaluationRow(name=name, seed=0, step=9, tokens=9, eval="audit", subset=f"layer {index}", metric=call(metric),
                      value=value, n=6, stderr=None, axis={})
        for name, found in layers.items()
        for index, pair in enumerate(found)
        for call, numbers in zip((untrained, str), pair, strict=True)
        for metric, value in zip(("visibility", "relation", "selection", "null"), numbers, strict=True)
    ]  # fmt: skip
    found = EvaluationResults(name="audit", unit="share", better="neither", axes=[], rows=rows)
    assert has_layers(found)
    return found


def test_a_verdict_is_explained_by_the_best_layers():
    layers = {
        "base": [(FULL, FULL)],
        "linear": [(LINEAR, LINEAR), (LINEAR, WINDOW)],
        "hybrid": [(LINEAR, LINEAR), (FULL, FULL)],
        "window": [(WINDOW, WINDOW)],
        "idle": [(FULL, IDLE)],
    }
    rows = (
        row("linear", 0.2, 0.05, "degrades"),
        row("hybrid", 0.1, 0.05, "degrades"),
        row("window", 0.3, 0.1, "keeps"),
    )
    given = study(*rows, without_gap("idle", "behind", "it is behind"), evaluations=[audit(**layers)])
    found = {one.audit.name: one for one in audited_rows(given)}
    assert found["linear"].audit.trained.selection == 0.45 and found["linear"].audit.trained.visibility == 1
    assert {name: one.words for name, one in found.items()} == {
        "base": "can select: 0.98 of 1",
        "linear": "degrades, and can only partly select: 0.45 of 1",
        "hybrid": "degrades, but can select: 0.98 of 1",
        "window": "keeps the capability, but sees 24 % of the past and can only partly select: 0.45 of 1",
        "idle": "is behind, and partly weighs positions by their content (0.50) and hardly selects, though its form "
        "can: 0.10 and 0.98 of 1",
    }
    assert found["base"].copying == given.maturity.copying and found["idle"].gap is None
    chart = selection_chart(given)
    points = {one["name"]: (one["x"], one["y"]) for one in chart["datasets"]["data-0"]}
    assert points == {"base": (0.98, 0), "linear": (0.45, 0.2), "hybrid": (0.98, 0.1), "window": (0.45, 0.3)}
    assert "selection" in {measure.name for measure in join([given], ["one"]).measures}
    (sheet,) = (sheet for sheet in sheets(given) if sheet.name == "audit")
    assert [cells[0] for cells in sheet.rows] == ["base", "linear", "hybrid", "window", "idle"]


def test_what_was_not_audited_shows_nothing():
    given = study(row("linear", 0.2, 0.05, "degrades"), row("other", 0.1, 0.05))
    assert audited_rows(given) == [] and selection_chart(given) is None
    one = study(row("linear", 0.2, 0.05, "degrades"), evaluations=[audit(linear=[(LINEAR, LINEAR)])])
    (only,) = audited_rows(one)
    assert only.words == "degrades, and cannot select: 0.21 of 1" and selection_chart(one) is None

"""What a study found, in words: who keeps, who degrades, and why others are undecided."""

from dataclasses import replace

import pytest

from basecap.analysis.results import DocumentCount, Overlap, Point, SweepRow
from basecap.analysis.rows import CopyingShares, Direction, DomainGap, GapPart, Interval, LeftOut
from basecap.analysis.sequential import AddedRuns, Looks
from basecap.analysis.text.reasons import of
from basecap.records.token_classes import CLASSES
from basecap.report.controls import controls_text
from basecap.report.maturity_text import copies_text, direction_text, maturity_text
from basecap.report.parts_text import carried_text, origin_text
from basecap.report.summary import row_text, summarise, table_text
from basecap.report.text_notes import notes
from basecap.report.text_summary import (
    EDGE,
    duration_text,
    edge_text,
    gap_text,
    headline,
    interval_text,
    rates_text,
    reasons,
    remarks,
    runs_text,
    share_text,
    single_run_caution,
    trained_models_only,
    unfinished,
    worth_interval_text,
    worth_text,
)
from tests.report.made_up import MATURE, gap, row, run_row, study, undecided, without_gap


def test_the_headline_says_who_keeps_degrades_is_undecided_and_behind():
    rows = [
        row("a", 0.0, 0.01, "keeps"),
        row("b", 0.3, 0.1, "degrades"),
        row("c", 0.3, 0.1, "degrades"),
        undecided("d"),
        without_gap("e", "behind", "its loss is high"),
    ]
    assert headline(study(*rows)) == (
        "Out of domain at equal pre-training loss, compared with base: a keeps the capability; b and c degrade; "
        "d is undecided; e is behind."
    )
    assert headline(study()) == "There is nothing to compare with base."


def test_what_the_reference_lacks_is_said_once_for_all_rows():
    lacks = "the reference has 2 evaluation points near the trained range and needs 4"
    rows = [without_gap(name, "undecided", lacks) for name in "ab"]
    rows.append(without_gap("c", "none", "no evaluation point"))
    assert headline(study(*rows)) == f"Nothing can be compared with base yet, as {lacks}."
    assert reasons(study(*rows)) == ["c: no evaluation point."]


def test_the_scale_of_a_few_steps_asks_for_no_more_evaluation_points():
    point = Point(name="base", seed=0, step=1, tokens=1, training=None, held_out=None, domains={})
    few = without_gap("a", "undecided", "the reference has 2 evaluation points: evaluate more often")
    behind = without_gap("b", "behind", "its loss is high; train about 3 million more tokens")
    points = [point, replace(point, name="a"), replace(point, name="b")]
    found = study(few, behind, scale="test", points=points, runs=[run_row(name, 0) for name in ("base", "a", "b")])
    sentence = "Scale test shows that the study runs; it is too small for verdicts."
    assert summarise(found).headline == sentence and not summarise(found).reasons
    assert [row_text(one, found) for one in (few, behind)] == [sentence, sentence]
    assert row_text(few, study(few, points=points)) == few.words, "another scale can follow the advice"
    assert summarise(replace(found, points=[])).headline.startswith("Nothing can be compared with base yet")


@pytest.mark.parametrize(
    ("value", "half", "words"),
    [
        (0.01, 0.05, "alike: any difference is smaller than the tolerance of 0.100 nats"),
        (0.01, 0.08, "no measurable difference"),  # the tolerance is uncertain by 0.01
        (-0.06, 0.05, "lower held-out loss at equal training loss"),
        (0.04, 0.03, "higher held-out loss at equal training loss, by less than the tolerance of 0.100 nats"),
    ],
)
def test_differences_of_a_mixed_study_in_words(value, half, words):
    assert of(row("a", value, half, "none"), MATURE) == words


def test_a_mixed_study_states_differences_and_no_verdict():
    rows = [row("a", 0.3, 0.1, "none"), row("b", -0.3, 0.1, "none"), row("c", 0.0, 0.1, "none")]
    rows.append(row("f", 0.01, 0.05, "none"))
    rows.append(without_gap("d", "behind", "its loss is high"))
    rows.append(without_gap("e", "none", "it has 3 evaluation points"))
    assert headline(study(*rows, mixed=True)) == (
        "Compared with base at equal training loss: a has a higher held-out loss; b has a lower held-out loss; "
        "f is alike; c shows no measurable difference; e is not compared; d is behind. "
        "This study trains on every domain that it tests, so there is no verdict."
    )
    terms = dict(notes(study(*rows, mixed=True)))
    assert "Tolerance" not in terms and "0.100 nats" in terms["Alike"]


def test_undecided_rows_are_grouped_by_reason_with_what_would_decide_them():
    few = "it has 3 evaluation points near the trained range and needs 4"
    rows = [
        without_gap("late", "behind", "its loss is high"),
        undecided("a", runs=7),
        without_gap("b", "undecided", few),
        undecided("c", runs=2),
        without_gap("d", "undecided", few),
        undecided("e"),
        row("f", 0.3, 0.1, "degrades"),
    ]
    assert reasons(study(*rows)) == [
        "a, c and e: the interval includes both 0 and the tolerance of 0.100 nats. More runs of each and of base have "
        "an even chance to decide: 2 for c (2 min of training), 7 for a (7 min of training). More runs alone will not "
        "decide e: use more held-out documents or train longer.",
        f"b and d: {few}.",
        "late: its loss is high.",
    ]


def test_a_gap_within_the_range_of_equal_models_is_undecided_for_that_reason():
    small = undecided("a", runs=2, gap=gap(0.12, 0.1, split=0.15))
    assert "by less than two groups of the reference's own runs differ (0.150 nats)" in reasons(study(small))[0]
    flat = undecided("a", gap=gap(0.12, 0.1, tolerance=None, tokens=None))
    assert reasons(study(flat)) == [
        "a: the reference's loss on unseen domains does not fall while it trains, so no gap can be judged."
    ]
    assert dict(notes(study(flat)))["Tolerance"].startswith("none")


def test_an_interval_below_the_tolerance_by_less_than_its_error_is_undecided_for_that_reason():
    (sentence,) = reasons(study(undecided("a", runs=1, gap=gap(0.05, 0.04))))
    assert "ends below the tolerance of 0.100 nats, but no further below than" in sentence
    assert "(standard error 0.010)" in sentence


def test_intervals_of_single_runs_hold_for_these_models():
    one = undecided("a", conditional=True)
    assert reasons(study(one))[0].endswith("nats. Train at least three seeds.")
    assert "too few runs" in trained_models_only(study(one)) and "seeds=[0,1,2]" in trained_models_only(study(one))
    assert trained_models_only(study(undecided("a"))) == ""
    for looked, way in (((1,), "again, with --until-decided --max-seeds 2."), ((1, 2), "with another --out and more")):
        words = trained_models_only(study(one, looks=Looks(most=2, looks=looked)))
        assert f"Train more seeds: run the same command {way}" in words and "seeds=[" not in words
    assert "for these trained models only" in dict(notes(study(one)))["Intervals"]
    assert "other seeds" in dict(notes(study(undecided("a"))))["Intervals"]


def test_a_row_of_one_run_says_that_its_variation_is_taken_from_others():
    one, two = undecided("a", seeds=[0]), undecided("b")
    assert single_run_caution(study(two)) == "" == single_run_caution(study(replace(one, conditional=True)))
    assert single_run_caution(study(one, two)).startswith("a has one run: how much it varies from seed to")
    assert single_run_caution(study(one, replace(one, name="c"))).startswith("a and c have one run: how much they vary")


def test_looks_at_a_growing_study_are_named():
    looks = Looks(most=8, looks=(2, 3, 4))
    said = dict(notes(study(undecided("a"), looks=looks)))["Intervals"]
    assert "Looked at after 2, 3 and 4 of at most 8 seeds; intervals hold over all looks together. They include" in said


def test_notes_say_what_the_tolerance_is_worth_and_how_equal_models_compare():
    said = dict(notes(study(undecided("a"), cost=0.05)))
    assert (
        "less than 5 % of the tokens of base: 0.100 nats here, standard error 0.010 (arxiv 0.100, github 0.100)"
        in said["Tolerance"]
    )
    assert "not measurable: fewer than 4 runs of base" in said["A-A range"]
    said = dict(notes(study(undecided("a", gap=gap(0.1, 0.1, split=0.05)))))
    assert "differ by up to 0.050 nats" in said["A-A range"] and "exceeds the A-A range" in said["Degrades"]
    assert notes(study(without_gap("a", "behind", "its loss is high"))) == []


def test_domains_of_few_documents_are_named():
    found = [DocumentCount(domain=name, documents=n, tokens=n, bytes=n) for name, n in (("arxiv", 29), ("github", 30))]
    said = "Too few held-out documents to measure a gap on arxiv (29): an interval needs 30."
    assert said in remarks(study(undecided("a"), documents=found))
    assert not remarks(study(without_gap("a", "behind", "its loss is high"), documents=found))


def test_few_clusters_make_intervals_conditional_on_their_sources():
    said = dict(notes(study(undecided("a"), few_clusters=["github"])))["Intervals"]
    assert "these sources only: the documents of github come from fewer than 30 clusters" in said
    assert "other seeds" not in said


def test_what_is_unusual_about_text_and_learning_rates_is_said():
    rates, losses = (0.001, 0.003), (3.1, None)
    swept = SweepRow(
        name="a", seed=0, split="validation", rates=rates, losses=losses, chosen=0.001, reached=False, at_edge=True
    )
    found = study(
        sweep=[swept],
        overlap=[Overlap(domain="c4", share=0.1, left_out=5), Overlap(domain="arxiv", share=0.0, left_out=0)],
        text_note="The text differs from the reference manifest",
    )
    assert remarks(found) == [
        "The text differs from the reference manifest.",
        "Held-out documents left out because they are in the training text: 5 of c4.",
        "The best learning rate is the lowest or the highest that was tried for a: "
        "a better one may be outside the range.",
    ]
    assert remarks(study()) == []


def test_chosen_learning_rates_are_named_once_each():
    def swept(name: str, chosen: float, at_edge: bool) -> SweepRow:
        rates, losses = (0.001, 0.002, 0.003), (3.1, 3.2, 3.3)
        return SweepRow(
            name=name,
            seed=0,
            split="validation",
            rates=rates,
            losses=losses,
            chosen=chosen,
            reached=False,
            at_edge=at_edge,
        )

    sweeps = [swept("a", 0.003, True), swept("b", 0.001, True), swept("c", 0.003, True)]
    assert (
        rates_text(sweeps, "held-out text")
        == "Learning rates, chosen on held-out text: 0.001 for b; 0.003 for a and c."
    )
    assert rates_text([], "held-out text") == ""
    assert edge_text(sweeps) == [f"{EDGE} for every architecture: a better one may be outside the range."]
    assert edge_text([*sweeps, swept("d", 0.002, False)])[0].startswith(f"{EDGE} for a, b and c: ")
    assert edge_text([]) == edge_text([swept("d", 0.002, False)]) == []


def test_numbers_and_what_is_not_there():
    found = gap(0.05, 0.1)
    assert (gap_text(found), interval_text(found)) == ("+0.050", "-0.050 … +0.150")
    assert gap_text(gap(-0.0001, 0.1)) == "+0.000"
    assert (worth_text(found), worth_interval_text(found)) == ("95 %", "86 … 105 %")
    assert {text(None) for text in (gap_text, interval_text, worth_text, worth_interval_text, share_text)} == {"–"}
    assert worth_text(replace(found, tokens=None)) == "–"
    assert [share_text(share) for share in (0.834, 0.002, 31.0)] == ["83 %", "< 1 %", "> 1,000 %"]
    first = undecided("a")
    assert runs_text(first) == "2 / 3" and runs_text(replace(first, seeds=[])) == "–"
    assert [duration_text(seconds) for seconds in (None, 48, 130)] == ["–", "48 s", "2 min 10 s"]


def test_runs_that_are_not_at_their_end_or_not_compared_are_named():
    diverged, short = LeftOut(seed=3, why="it diverged"), LeftOut(seed=1, why="it ends early")
    rows = [replace(row("a", 0.0, 0.1), seeds=[0], left_out=[short], reference_left_out=[diverged])]
    runs = [
        run_row(name, seed, status=status, tokens=30_081_024)
        for name, seed, status in (("a", 0, "running"), ("a", 1, "running"), ("base", 3, "failed"))
    ]
    found = study(*rows, runs=runs)
    assert unfinished(found) == (
        "Not finished, compared at their latest evaluation points: a (seed 0) at 30,081,024 tokens; "
        "not compared: a (seed 1) at 30,081,024 tokens. "
        "Run the same command again, with its --set and --only, to resume."
    )
    assert remarks(found) == [
        "Left out of the comparison: base seed 3 (it diverged). 3 runs of base are compared.",
    ]
    found = study(*rows, runs=[replace(run, status="finished") for run in runs])
    assert unfinished(found) == "" and "a seed 1 (it ends early)" in remarks(found)[0]


def test_a_table_that_is_too_early_says_so_once():
    """What helps the reference helps every row; a row that drifts says so for itself."""
    young = replace(MATURE, state="early", words="train about 90 million more tokens: it has started to copy")
    early = [row(name, 0.3, 0.1, "early") for name in ("a", "b")]
    found = study(*early, maturity=young)
    assert headline(found).endswith("compared with base: a and b are too early to judge.")
    assert reasons(found) == [
        "Too early: train about 90 million more tokens: it has started to copy. Until the reference has learned to "
        "copy from its context, a gap says who is ahead at this age, not what an architecture keeps: so no row has a "
        "verdict. Compared with base at this age, a and b are worse out of domain."
    ]
    sides = study(row("a", -0.3, 0.1, "early"), row("b", 0.05, 0.1, "early"), maturity=young)
    assert reasons(sides)[0].endswith("at this age, a is better out of domain; b shows no measurable difference.")
    assert reasons(study(without_gap("a", "early", "late"), maturity=young))[0].endswith("so no row has a verdict.")
    assert "all 4 architectures are too early to judge" in headline(
        study(*(row(name, 0.3, 0.1, "early") for name in "abcd"), maturity=young)
    )
    unknown = study(row("a", 0.3, 0.1, "maturity unknown"), maturity=replace(young, state="maturity unknown"))
    assert headline(unknown).endswith("a has no verdict, as maturity is unknown.")
    assert reasons(unknown)[0].startswith("Maturity unknown: train about")
    cell = replace(early[0], words=f"too early; {young.words}; left out: seed 1")
    assert table_text(cell, found) == "too early, as base is; left out: seed 1" and row_text(cell, found) == cell.words
    drifts = replace(early[0], words="too early: the gap drifts")
    assert table_text(drifts, study(drifts)) == drifts.words
    assert reasons(study(drifts, row("b", 0.3, 0.1, "degrades"))) == ["a: too early: the gap drifts."]


def test_a_control_tells_whether_the_study_sees_a_loss():
    """Its interval has to lie above the tolerance, whatever the row's verdict; where it does not, that is said."""
    unseen = "so nothing shows that this study would see a loss of capability."

    def said(found):
        return [text for text in summarise(study(found, controls=[found.name])).reasons if "Control" in text]

    assert said(row("a", 0.3, 0.1, "early")) == [
        "Control: a must be worse. Its gap of +0.300 nats (+0.200 … +0.400) lies above the tolerance of 0.100, as it "
        "has to: this study sees a loss of capability of that size."
    ]
    for value in (0.15, -0.3):
        (text,) = said(row("a", value, 0.1, "early"))
        assert "does not lie above the tolerance of 0.100: the control fails" in text and text.endswith(unseen)
    young = replace(MATURE, state="maturity unknown")
    texts = summarise(study(row("a", 0.0, 0.1, "maturity unknown"), controls=["a"], maturity=young)).reasons
    assert texts[1].endswith(f"the control fails at this age, {unseen}")
    (text,) = said(without_gap("a", "behind", "its loss is high"))
    assert text == f"Control: a, which must be worse, could not be compared (its loss is high), {unseen}"
    without = replace(row("a", 0.3, 0.1, "early"), gap=gap(0.3, 0.1, tolerance=None))
    assert said(without)[0].endswith(f"has a gap of +0.300 nats (+0.200 … +0.400) and nothing to judge it by, {unseen}")
    assert not any("Control" in text for text in summarise(study(row("a", 0.3, 0.1, "early"))).reasons)
    assert controls_text(study(controls=["not trained"])) == []
    assert controls_text(study(row("must fail", 0.2, 0.1), mixed=True, controls=["must fail"])) == []


def test_a_reference_that_overfits_is_named():
    found = study(row("a", 0.0, 0.1), maturity=replace(MATURE, rises=2.3e8))
    said = "The held-out loss of base rises after 230 million tokens, where it overfits its training text"
    assert said in remarks(found)[0] and said in maturity_text(found)
    assert maturity_text(study()) == "Mature: the reference is past its transition."


def test_copying_and_direction_are_written_for_the_table():
    shares = CopyingShares(begin=0.116, end=0.2847)
    assert copies_text(shares) == "11.6 … 28.5 %" and copies_text(replace(shares, begin=None)) == "– … 28.5 %"
    assert copies_text(CopyingShares(begin=-4e-6, end=-0.012)) == "0.0 … -1.2 %"
    assert copies_text(None) == copies_text(CopyingShares(begin=None, end=None)) == "–"
    moved, after = (Interval(value=0.1, low=low, high=0.2) for low in (0.01, -0.1))
    where = Direction(now=0.1, drift=moved, next=after, state="open")
    found = gap(0.0, 0.1, direction=where)
    assert direction_text(found) == "rises; another such range may change the verdict"
    still = replace(found, direction=replace(where, drift=after, state=None))
    assert direction_text(still) == "no measurable drift" and direction_text(gap(0.0, 0.1)) == "–"


def test_runs_that_were_added_after_a_table_are_named():
    added = AddedRuns(runs={"a": [5, 6]}, tables=1, confidence=0.9)
    found = study(row("a", 0.0, 0.1), added=added)
    assert (
        "seeds of a 5, 6. Where what was seen led to that, the intervals hold with at least 90 %"
        in (summarise(found).cautions[0])
    )
    assert (
        "Over all 2 tables that were made of this study they hold with at least 90 %."
        in dict(notes(found))["Intervals"]
    )


def divided(values: tuple[float, ...], half: float | None = 0.01):
    """Return a row whose gap has these parts: copied, misled, new; without intervals where `half` is None."""
    whole = sum(values)
    parts = [
        GapPart(
            name=name,
            value=value,
            low=None if half is None else value - half,
            high=None if half is None else value + half,
            tokens=1 / 3,
            share=value / whole if abs(whole) > 0.1 else None,
        )
        for name, value in zip(CLASSES, values, strict=True)
    ]
    return replace(row("a", whole, 0.1), parts=tuple(parts))


def test_a_domain_that_carries_most_of_a_gap_is_named_in_the_headline():
    def by_domain(name: str, first: float, second: float, half: float = 0.01):
        gaps = ((domain, gap(value, half)) for domain, value in zip(("c", "python"), (first, second), strict=True))
        domains = tuple(DomainGap(domain=domain, **vars(found)) for domain, found in gaps)
        return replace(row(name, (first + second) / 2, 0.1, "keeps"), domains=domains)

    found = study(by_domain("a", -0.199, 0.004), by_domain("b", 0.2, 0.15), by_domain("d", 0.01, 0.3))
    said = "One domain carries most of the gap of a (c -0.199; python +0.004) and d (python +0.300; c +0.010)."
    assert summarise(found).headline.endswith(f" {said}")
    for other in (by_domain("a", 0.2, 0.19), by_domain("a", 0.2, 0.0, half=0.3), by_domain("a", -0.2, 0.19)):
        assert carried_text(study(other)) == "", "even, or not surely so, or on both sides"


def test_a_class_that_carries_most_of_a_gap_is_named():
    assert origin_text(divided((0.25, 0.01, 0.04)), study()) == (
        "copies less: tokens that a copy from the context predicts contribute +0.250 to the gap of +0.300 nats"
    )
    assert origin_text(divided((0.25, 0.01, 0.04), None), study()).endswith("nats (one run)")
    late = replace(divided((0.3, 0.0, 0.0)), copying=CopyingShares(begin=0.01, end=0.02))
    assert origin_text(late, study()).startswith("copies less so far: ")
    young = study(maturity=replace(MATURE, state="early"))
    assert origin_text(late, young).startswith("copies later: ")
    assert origin_text(divided((-0.3, 0.0, 0.0)), young).startswith("copies earlier: ")
    assert origin_text(divided((-0.01, 0.0, -0.3)), young).startswith("generalises better: tokens without a precedent")
    assert origin_text(divided((0.0, 0.3, 0.01)), study()).startswith("is misled more: ")


def test_nothing_is_said_where_no_class_carries_most_of_a_gap():
    assert origin_text(divided((0.2, 0.0, 0.15)), study()) == ""
    assert origin_text(divided((0.4, 0.0, -0.35)), study()) == "", "the gap may be 0"
    assert origin_text(divided((0.25, 0.01, 0.04), 0.3), study()) == "", "the part may be 0"
    assert origin_text(row("a", 0.3, 0.1), study()) == "", "records without classes"

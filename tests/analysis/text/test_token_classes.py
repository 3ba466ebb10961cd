"""A gap is the sum of what lies in each class of tokens."""

import pytest

from basecap.analysis.text.token_classes import class_curve, class_gaps
from basecap.records.measured import Record
from basecap.records.token_classes import CLASSES, COPIED, NEW, loss_metric

#: Tokens of each class: copied, misled, new.
COUNTS = (30, 20, 50)


def records(held_out: list[float], copied: list[float], new: list[float], classes: bool = True) -> list[Record]:
    """Return the records of a run by its held-out losses, and its losses on copied and new tokens of code."""
    rows = []
    for step, values in enumerate(zip(held_out, copied, new, strict=True)):
        where = {"step": step, "tokens": 100 * step, "eval": "domain-loss"}
        losses = (values[1], 4.0, values[2])
        whole = sum(loss * count for loss, count in zip(losses, COUNTS, strict=True)) / 100
        rows += [
            Record(subset="prose", metric="loss", value=values[0], n=1000, **where),
            Record(subset="code", metric="loss", value=whole, n=100, **where),
        ]
        for name, loss, count in zip(CLASSES, losses, COUNTS, strict=True) if classes else ():
            rows.append(Record(subset="code", metric=loss_metric(name), value=loss, n=count, **where))
    return rows


def curve(*given, **more):
    return class_curve(records(*given, **more), ["prose"], ["code"])


def test_the_parts_add_up_to_the_gap_at_equal_held_out_loss():
    reference = [curve([4.0, 3.0], [3.0 + shift, 2.0 + shift], [5.0, 4.0]) for shift in (0.0, 0.1)]
    own = [curve([3.8, 2.8], [3.9, 2.9], [4.75, 3.75]) for _ in range(2)]  # at equal loss 1.05 and -0.05 apart
    found = {part.name: part for part in class_gaps(own, reference, 3.2, 3.6)}
    assert [found[name].tokens for name in CLASSES] == [0.3, 0.2, 0.5]
    assert found[COPIED].gap == pytest.approx(0.3 * 1.05) and found[NEW].gap == pytest.approx(0.5 * -0.05)
    assert found["misled"].gap == pytest.approx(0)
    assert found[COPIED].error == pytest.approx(0.3 * 0.05) and found[NEW].error == pytest.approx(0)
    whole = sum(part.gap for part in found.values())
    assert [found[name].share for name in CLASSES] == pytest.approx([found[name].gap / whole for name in CLASSES])


def test_one_run_has_no_error_and_a_range_that_is_not_reached_no_parts():
    run = curve([4.0, 3.0], [3.0, 2.0], [5.0, 4.0])
    (part, *_) = class_gaps([run], [run], 3.2, 3.6)
    assert part.error is None and part.gap == 0 and part.share is None
    assert class_gaps([run], [run], 2.0, 2.5) == [] and class_gaps([], [run], 3.2, 3.6) == []


def test_records_without_classes_have_no_curve():
    assert curve([4.0], [3.0], [5.0], classes=False) is None
    assert class_curve([], ["prose"], ["code"]) is None
    nan = curve([4.0, 3.0], [float("nan"), 2.0], [5.0, 4.0])
    assert nan is not None and nan.held_out.tolist() == [3.0]

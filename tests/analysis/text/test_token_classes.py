"""A gap is the sum of what lies in each class of tokens."""

import numpy as np
import pytest
from scipy.stats import ttest_ind

from basecap.analysis.rows import Interval
from basecap.analysis.text.class_losses import ClassLosses, class_losses
from basecap.analysis.text.draws import Curve
from basecap.analysis.text.gap import Range
from basecap.analysis.text.losses import DomainLosses, RunLosses, joined
from basecap.analysis.text.token_classes import class_levels, gap_parts
from basecap.records.measured import Record
from basecap.records.token_classes import CLASSES, COPIED, MISLED, NEW, loss_metric

X = np.linspace(4.0, 3.0, 11)
RANGE = Range(low=np.array([3.2]), high=np.array([3.6]))
WHOLE = Interval(value=0.4, low=0.1, high=0.7)


def records(step: int, copied: float, new: float, classes: bool = True) -> list[Record]:
    where = {"step": step, "tokens": 100 * step, "eval": "domain-loss", "subset": "code"}
    found = [Record(metric="loss", value=0.3 * copied + 0.7 * new, n=100, **where)]
    if classes:
        found += [
            Record(metric=loss_metric(COPIED), value=copied, n=30, **where),
            Record(metric=loss_metric(NEW), value=new, n=70, **where),
        ]
    return found


def run(copied: float, new: float, missing: int = 0) -> tuple[RunLosses, Curve]:
    """Return a run whose loss is higher by these numbers in each class; its first points lack classes."""
    found = [
        record for step, x in enumerate(X.tolist()) for record in records(step, x + copied, x + new, step >= missing)
    ]
    losses = DomainLosses(
        nats=np.ones((1, len(X))),
        tokens=np.array([100]),
        bytes=np.array([400]),
        clusters=np.array([0]),
        classes=class_losses(found, "code", range(len(X))),
    )
    trained = np.arange(1, len(X) + 1)
    return RunLosses(trained, X, {"code": losses}), Curve(x=X[None], y=np.ones((1, 1, len(X))), trained=trained)


def levels(own, reference):
    return class_levels(own, reference, RANGE, ["code"])


def test_classes_add_up_to_the_loss_and_points_without_them_are_unknown():
    found = class_losses([*records(1, 2.0, 4.0, False), *records(2, 2.0, 4.0)], "code", [1, 2])
    assert found.tokens == pytest.approx([0.3, 0, 0.7])
    assert np.isnan(found.nats[:, 0]).all() and found.nats[:, 1] == pytest.approx([0.6, 0, 2.8])
    assert class_losses(records(1, 2.0, 4.0, False), "code", [1]) is None
    assert class_losses(records(1, 2.0, 4.0), "prose", [1]) is None


def test_the_parts_of_a_gap_have_intervals_over_runs():
    found = levels([run(1.0, 0.1), run(1.2, 0.1)], [run(0.0, 0.0), run(0.1, 0.0), run(0.2, 0.0)])
    parts = {part.name: part for part in gap_parts(found, np.ones(1), WHOLE)}
    assert list(parts) == list(CLASSES) and [parts[name].tokens for name in CLASSES] == pytest.approx([0.3, 0, 0.7])
    assert [parts[name].value for name in CLASSES] == pytest.approx([0.3 * 1.0, 0, 0.7 * 0.1])
    assert parts[COPIED].share == pytest.approx(0.3 / 0.4) and parts[MISLED].value == 0
    welch = ttest_ind([0.3, 0.36], [0.0, 0.03, 0.06], equal_var=False).confidence_interval(0.95)
    assert (parts[COPIED].low, parts[COPIED].high) == pytest.approx((welch.low, welch.high))
    assert parts[NEW].low == pytest.approx(parts[NEW].value) == pytest.approx(parts[NEW].high)


def test_a_single_run_has_no_interval_and_a_gap_that_may_be_0_no_shares():
    found = levels([run(1.0, 0.0)], [run(0.0, 0.0), run(0.1, 0.0)])
    parts = gap_parts(found, np.ones(1), Interval(value=0.3, low=-0.1, high=0.7))
    assert {(part.low, part.high, part.share) for part in parts} == {(None, None, None)}


def test_points_without_classes_matter_only_near_the_range():
    """Runs that were continued with a later version have them from there on."""
    far, near = run(1.0, 0.0, missing=1), run(1.0, 0.0, missing=5)
    (part, *_) = gap_parts(levels([far], [run(0.0, 0.0)]), np.ones(1), WHOLE)
    assert part.value == pytest.approx(0.3)
    assert levels([near], [run(0.0, 0.0)]) is None and levels([far], [near]) is None
    assert levels([far], [run(0.0, 0.0, missing=len(X))]) is None


def test_a_curve_may_end_before_its_run():
    losses, curve = run(1.0, 0.0)
    cut = Curve(x=curve.x[:, :9], y=curve.y[..., :9], trained=curve.trained[:9])
    (part, *_) = gap_parts(levels([(losses, cut)], [run(0.0, 0.0)]), np.ones(1), WHOLE)
    assert part.value == pytest.approx(0.3)


def test_classes_follow_the_points_of_a_run():
    (first, _), (second, _), (without, _) = run(1.0, 0.0), run(2.0, 0.0), run(0.0, 0.0, missing=len(X))
    both = joined([first, second]).domains["code"].classes
    assert isinstance(both, ClassLosses) and both.nats.shape == (3, 2 * len(X))
    assert joined([first, without]).domains["code"].classes is None
    long = joined([first] * 4)
    assert long.domains["code"].classes.nats.shape[1] == len(long.trained) < 4 * len(X)

"""What a plan says of maturity before anything is trained."""

import pytest

from basecap.plan.maturity import maturity_warnings
from basecap.plan.runs import plan_study
from basecap.study.config import StudyConfig


def said(study: dict, tokens: float, parameters: float = 30e6, sizes: tuple[int, ...] = (), **changes) -> list[str]:
    """Return what is said of a study of so many tokens."""
    train = study["train"] | {"tokens": tokens, "eval_every": None}
    config = StudyConfig.model_validate(study | {"train": train, "evals": ["domain-loss", "copying"]} | changes)
    return maturity_warnings(plan_study(config, config.vocabulary), parameters, sizes)


def test_a_budget_below_the_transition_is_warned_of(study):
    """Below 172M tokens, or below as many a parameter as the reference of limited-zoo took; half of them must count.

    Eight runs of the reference of 150M tokens are early, by 22M.
    """
    line, warning = said(study, 150e6)
    assert line == "transformer++ trains on 150M tokens, 5 per parameter."
    assert "needs 172M tokens, 5.7 per parameter" in warning and warning.startswith("Warning: the report may say early")
    assert len(said(study, 175e6)) == 1
    assert said(study, 100e9, parameters=110e6) == ["transformer++ trains on 100,000M tokens, 910 per parameter."]
    assert "needs 172M tokens" in said(study, 175e6, parameters=60e6)[1]
    assert "needs 115M tokens" in said(study, 60e6, gap={"from": 0.75})[1]


def test_the_budget_of_branches_counts_not_that_of_their_trunk(study):
    train = study["train"] | {"schedule": "wsd", "decay": 0.2}
    assert said(study | {"train": train}, 175e6) == said(study, 175e6)


@pytest.mark.parametrize(("size", "passes"), [(50_000_000, None), (43_750_000, "4 times"), (35_000_000, "5 times")])
def test_many_passes_over_the_text_are_warned_of(study, size, passes):
    found = said(study, 175e6, sizes=(size,))
    assert len(found) == 1 + bool(passes) and (passes is None or f"read their training text {passes}" in found[1])


@pytest.mark.parametrize(
    ("copying", "train", "enough"),
    [
        ([], {}, False),
        ([{"copying": {"at": "end"}}], {}, False),
        ([{"copying": {"at": [50e6, 175e6]}}], {}, True),  # the nearest points are near enough
        ([{"copying": {"at": [20e6, 175e6]}}], {}, False),
        ([{"copying": {"name": "again"}}], {}, False),  # reports look for its own name
        ([{"copying": {"at": "end"}}], {"schedule": "wsd", "branches": [80e6, 120e6]}, True),  # of each branch
    ],
)
def test_a_study_that_does_not_measure_copying_is_warned_of(study, copying, train, enough):
    changed = study | {"train": study["train"] | train}
    found = said(changed, 175e6, evals=["domain-loss", *copying])
    warning = "no row will have a verdict, as copying is not evaluated where the trained range begins and ends"
    assert len(found) == 2 - enough and (enough or warning in found[1])


def test_a_scale_of_a_few_steps_and_mixed_domains_get_no_warning(study):
    assert said(study, 60e6, scale="test") == []
    data = study["data"] | {"train": [*study["data"]["train"], *study["data"]["ood"]], "ood": []}
    assert len(said(study, 60e6, data=data, evals=["domain-loss"])) == 1

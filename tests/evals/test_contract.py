"""What every evaluation is: split among processes if it is one of basecap, and a class with the parts of one."""

import pytest

from basecap.errors import ConfigError
from basecap.evals import EVALUATIONS, Evaluation, Outcome, SharedEvaluation, evaluation
from basecap.evals.inference_speed import InferenceSpeed


def test_every_evaluation_of_basecap_is_split_but_the_one_that_measures_time():
    own = [EVALUATIONS.get(name) for name in EVALUATIONS.names()]
    own = [cls for cls in own if cls.__module__.startswith("basecap.evals.")]
    assert len(own) >= 9 and [cls for cls in own if not issubclass(cls, SharedEvaluation)] == [InferenceSpeed]


class Own(Evaluation):
    def run(self, model, context):
        return Outcome(measurements=[])


class Unfinished(Evaluation):
    pass


@pytest.mark.parametrize(
    ("cls", "better", "words"),
    [
        (int, "lower", "is not a subclass of basecap.evals.Evaluation; derive it"),
        (Unfinished, "lower", "has no method run; define it"),
        (type("Loose", (Own,), {"Config": dict}), "lower", "has a Config that is not a subclass"),
        (type("Texts", (Own,), {"needs": "texts"}), "lower", "needs 'texts'; set it to 'text' or 'task'"),
        (Own, "more", "declares better = 'more'; set it to 'lower'"),
    ],
)
def test_a_class_that_cannot_measure_is_not_registered(cls, better, words):
    with pytest.raises(ConfigError, match=f"^evaluation 'own' {words}"):
        evaluation("own", unit="share", better=better)(cls)
    assert "own" not in EVALUATIONS.names()

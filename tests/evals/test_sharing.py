"""Evaluations of basecap are split among processes."""

from basecap.evals import EVALUATIONS, SharedEvaluation


def test_every_evaluation_of_basecap_is_split():
    own = [EVALUATIONS.get(name) for name in EVALUATIONS.names()]
    own = [cls for cls in own if cls.__module__.startswith("basecap.evals.")]
    assert len(own) >= 7 and all(issubclass(cls, SharedEvaluation) for cls in own)

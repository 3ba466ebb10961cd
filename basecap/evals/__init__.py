"""Evaluations, one file each; every module of this package is imported to find them."""

from basecap.evals._contract import (
    EVALUATIONS,
    At,
    Context,
    Evaluation,
    EvaluationConfig,
    Measurement,
    Outcome,
    SharedEvaluation,
    build_evaluation,
    evaluation,
    includes,
)

__all__ = [
    "EVALUATIONS",
    "At",
    "Context",
    "Evaluation",
    "EvaluationConfig",
    "Measurement",
    "Outcome",
    "SharedEvaluation",
    "build_evaluation",
    "evaluation",
    "includes",
]

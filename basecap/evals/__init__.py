"""Evaluations: one file each, found by scanning."""

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

"""Evaluations, one file each; every module of this package is imported to find them."""

from basecap.evals._contract import (
    EVALUATIONS,
    Context,
    Decoding,
    Evaluation,
    EvaluationConfig,
    Measurement,
    Outcome,
    SharedEvaluation,
    build_evaluation,
    evaluation,
)
from basecap.evals._deployed import refuse_positions
from basecap.evals._passes import padded_lengths, token_losses
from basecap.evals._replays import ReplayedPasses

__all__ = [
    "EVALUATIONS",
    "Context",
    "Decoding",
    "Evaluation",
    "EvaluationConfig",
    "Measurement",
    "Outcome",
    "ReplayedPasses",
    "SharedEvaluation",
    "build_evaluation",
    "evaluation",
    "padded_lengths",
    "refuse_positions",
    "token_losses",
]

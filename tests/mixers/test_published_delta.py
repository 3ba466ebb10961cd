"""How fla starts each parameter of DeltaNet and Gated DeltaNet; see `_published`.

_init_weights: every nn.Linear and nn.Conv1d (ShortConvolution is one) normal, std initializer_range = 0.02, output
projections and embeddings too: prenorm_residual_strategy is None. RMSNorms start at 1. tie_word_embeddings is False.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.mixers._published import (
    ONES,
    ZEROS,
    At,
    Exactly,
    Row,
    Table,
    assert_table_holds,
    log_of_uniform,
    normal,
    steps,
    uniform,
)

COMMIT = "fla-org/flash-linear-attention@bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"
UNDECAYED = "Gains of norms do not decay"

COMMON = (
    Row(r"(embedding|head)\.weight", normal(0.02)),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False, differs=UNDECAYED),
    Row(r"mixer\.norm_weight", ONES, decay=False, differs=UNDECAYED),
    Row(r"mixer\.memory\.(qkv|beta)\.weight", normal(0.02)),
    Row(r"feed_forward\.(gate|up|down)\.weight", normal(0.02)),
)
CONVOLUTION = (Row(r"mixer\.memory\.conv\.weight", normal(0.02)), Row(r"mixer\.out\.weight", normal(0.02)))
OUT = CONVOLUTION[1]
OWN_BOUNDS = "Each layer learns a lower bound of its own"


def bounds(at: At) -> Exactly:
    """index / depth after the sigmoid."""
    return Exactly(torch.logit(torch.full((at.hidden,), at.index / at.depth, dtype=torch.float64)))


NONE = Row(
    r"mixer\.out\.weight",
    lambda at: normal(0.02 / math.sqrt(2 * at.depth)),
    differs="Without convolutions the output projection is shrunk with depth",
)

DELTANET = f"{COMMIT}: fla/models/delta_net/modeling_delta_net.py, fla/layers/delta_net.py"
GATED = f"{COMMIT}: fla/models/gated_deltanet/modeling_gated_deltanet.py, fla/layers/gated_deltanet.py"

#: GatedDeltaNet: A uniform in (0, 16), dt log-uniform in [0.001, 0.1], both marked _no_weight_decay.
GATES = (
    Row(r"mixer\.(decay|gate)\.weight", normal(0.02)),
    Row(r"mixer\.A_log", log_of_uniform(0.0, 16.0), decay=False),
    Row(r"mixer\.dt_bias", steps(1e-3, 0.1), decay=False),
)

KDA = f"{COMMIT}: fla/layers/kda.py, fla/models/kda/modeling_kda.py, fla/ops/kda/naive.py"

#: KDA: A uniform in (1, 16), dt log-uniform in [0.001, 0.1] for each channel, both marked _no_weight_decay.
CHANNEL_GATES = (
    Row(r"mixer\.(decay|gate)_(down|up)\.weight", normal(0.02)),
    Row(r"mixer\.gate_up\.bias", ZEROS, decay=False),
    Row(r"mixer\.A_log", log_of_uniform(1.0, 16.0), decay=False),
    Row(r"mixer\.dt_bias", steps(1e-3, 0.1), decay=False),
)

#: The layer alone, with the values of KDA.
GATED_2 = f"{COMMIT}: fla/layers/gdn2.py, fla/ops/gdn2/naive.py"

GLA = f"{COMMIT}: fla/layers/gla.py, fla/models/gla/modeling_gla.py"
HGRN_2 = f"{COMMIT}: fla/layers/hgrn2.py, fla/models/hgrn2/modeling_hgrn2.py"
RETNET = f"{COMMIT}: fla/layers/multiscale_retention.py, fla/models/retnet/modeling_retnet.py"

#: What GLA, HGRN-2 and RetNet have beside the memory's projections; their models start as DeltaNet's.
LINEAR = (
    *(row for row in COMMON if "memory" not in row.pattern),
    Row(r"mixer\.(qkv|qfv|gate|decay_down|decay_up)\.weight", normal(0.02)),
)

TABLES = {
    "gla": Table(source=GLA, rows=(*LINEAR, OUT, Row(r"mixer\.decay_up\.bias", ZEROS, decay=False))),
    "hgrn-2": Table(source=HGRN_2, rows=(*LINEAR, OUT, Row(r"mixer\.bound", bounds, decay=False, differs=OWN_BOUNDS))),
    "retnet": Table(source=RETNET, rows=(*LINEAR, replace(NONE, differs="is shrunk with depth: at fla"))),
    "kda": Table(source=KDA, rows=(*COMMON, *CONVOLUTION, *CHANNEL_GATES)),
    "gated-deltanet-2": Table(
        source=GATED_2,
        rows=(*COMMON, Row(r"mixer\.memory\.write\.weight", normal(0.02)), *CONVOLUTION, *CHANNEL_GATES),
    ),
    "deltanet": Table(source=DELTANET, rows=(*COMMON, *CONVOLUTION)),
    "deltanet w/o conv": Table(source=DELTANET, rows=(*COMMON, NONE)),
    "gated-deltanet": Table(source=GATED, rows=(*COMMON, *CONVOLUTION, *GATES)),
    "gated-deltanet canon": Table(
        source=GATED,
        rows=(
            *COMMON,
            *CONVOLUTION,
            *GATES,
            Row(r"(canon_a|canon_c|feed_forward\.canon)\.conv\.weight", uniform(-0.5, 0.5)),
        ),
    ),
    "gated-deltanet w/o conv": Table(source=GATED, rows=(*COMMON, NONE, *GATES)),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

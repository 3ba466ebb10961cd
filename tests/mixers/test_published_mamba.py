"""How the official code starts each parameter of Mamba and of its global selection; see `_published`.

nn.Linear and nn.Conv1d keep PyTorch's defaults: uniform within 1 / sqrt(inputs), the convolution's bias too. Of them
_init_weights sets out_proj.weight anew, divided by sqrt(layers), and the embedding, std 0.02. tie_embeddings is True.
A_log, D and dt_bias are marked _no_weight_decay.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.mixers._published import (
    ONES,
    At,
    Exactly,
    Follows,
    Row,
    Table,
    assert_table_holds,
    log_of_uniform,
    normal,
    steps,
)
from tests.mixers._published import uniform as between

COMMIT = "state-spaces/mamba@e9594ce1c732d97440f0332fdc43170a2294dbfa"
NO_TRAINER = "Mamba's authors publish no trainer"
SHARED = "The shared decay has a separate step size"


def pytorch(at: At) -> Follows:
    """Within 1 / sqrt(inputs) for a matrix [outputs, inputs]."""
    return between(-(at.shape[-1] ** -0.5), at.shape[-1] ** -0.5)


def shrunk(at: At) -> Follows:
    bound = 1 / math.sqrt(at.shape[-1] * at.depth)
    return between(-bound, bound)


def taps(width: int) -> Follows:
    return between(-(width**-0.5), width**-0.5)


AROUND = (
    Row(r"embedding\.weight", normal(0.02), differs=NO_TRAINER),
    Row(r"(norm|mixer_norm)\.weight", ONES, decay=False, differs=NO_TRAINER),
    Row(r"mixer\.in_proj\.weight", pytorch),
    Row(r"mixer\.out_proj\.weight", shrunk),
    Row(r"mixer\.D", ONES, decay=False),
)
CONVOLUTION = (
    Row(r"mixer\.conv\.weight", taps(4), differs=NO_TRAINER),
    Row(r"mixer\.conv\.bias", taps(4), decay=False, differs=NO_TRAINER),
)

#: dt_proj.weight: within dt_rank^-0.5, which is also PyTorch's default; its bias is a step size.
SELECTIVE = (
    *AROUND,
    Row(r"mixer\.(x_proj|dt_proj)\.weight", pytorch),
    Row(r"mixer\.dt_proj\.bias", steps(1e-3, 0.1), decay=False, differs=NO_TRAINER),
)


def s4d_real(state: int) -> Row:
    rates = torch.arange(1, state + 1, dtype=torch.float64).log().expand(256, -1)
    return Row(r"mixer\.A_log", Exactly(rates), decay=False)


#: Longconv: nn.Conv1d with its defaults; 16 taps, a quarter of these sequences. CustomMambaForCausalLM inherits
#: _init_weights of transformers (4.45), which knows a mixer by its own class: of this one it sets only dt_proj.bias,
#: to 0, as of any nn.Linear. src/train_dev2.py gives all parameters to AdamW with one weight decay.
ALL_DECAY = "All parameters decay there"
LONG = (
    Row(r"embedding\.weight", normal(0.02), differs="embedding of std 0.1"),
    Row(r"(norm|mixer_norm)\.weight", ONES, decay=False, differs=ALL_DECAY),
    Row(r"mixer\.(in_proj|x_proj|dt_proj)\.weight", pytorch),
    Row(r"mixer\.dt_proj\.bias", steps(1e-3, 0.1), decay=False, differs="a step-size bias of 0"),
    Row(r"mixer\.out_proj\.weight", shrunk, differs="an output projection not shrunk with depth"),
    Row(r"mixer\.D", ONES, decay=False, differs=ALL_DECAY),
    replace(s4d_real(16), differs=ALL_DECAY),
    Row(r"mixer\.conv\.weight", taps(4)),
    Row(r"mixer\.conv\.bias", taps(4), decay=False, differs=ALL_DECAY),
    Row(r"mixer\.long_conv\.weight", taps(16)),
    Row(r"mixer\.long_conv\.bias", taps(16), decay=False, differs=ALL_DECAY),
)

MAMBA_1 = f"{COMMIT}: mamba_ssm/modules/mamba_simple.py, mamba_ssm/models/mixer_seq_simple.py"
MAMBA_2 = f"{COMMIT}: mamba_ssm/modules/mamba2.py, mamba_ssm/models/mixer_seq_simple.py"
MAMBA_3 = (
    f"{COMMIT}: mamba_ssm/modules/mamba3.py, tests/ops/triton/test_mamba3_siso.py, "
    "tests/ops/tilelang/test_mamba3_mimo.py"
)
GLOBAL = (
    "ZetangForward/Global_Mamba@859b5695e7a05d880371d70fb10da6bba699afb0: models/custom_mamba_v3_fast_dev.py, "
    "models/modules/longconv.py, models/configuration_mamba.py, src/train_dev2.py"
)

#: Of arXiv 2505.18522, without code: one decay, with a step size of its own.
ONE_RATE = Row(r"mixer\.A_log", log_of_uniform(1, 16), decay=False, differs=SHARED)
ONE_STEP = Row(r"mixer\.decay_bias", steps(1e-3, 0.1), decay=False, differs=SHARED)

#: Mamba2: A uniform in A_init_range (1, 16); RMSNormGated starts at 1.
HEADS = (*AROUND, Row(r"mixer\.dt_bias", steps(1e-3, 0.1), decay=False))
RATES = Row(r"mixer\.A_log", log_of_uniform(1, 16), decay=False)
GAIN = Row(r"mixer\.norm_weight", ONES, decay=False, differs=NO_TRAINER)

#: Mamba3: B_bias and C_bias are 1 and decay, with the norms' gains; D and dt_bias are marked _no_weight_decay.
THREE = (
    *AROUND,
    Row(r"mixer\.dt_bias", steps(1e-3, 0.1), decay=False),
    Row(r"mixer\.[BC]_bias", ONES),
    Row(r"mixer\.[BC]_gain", ONES, decay=False, differs=NO_TRAINER),
    Row(r"(head|feed_forward\.(gate|up|down))\.weight", normal(0.02), differs=NO_TRAINER),
    Row(r"feed_forward_norm\.weight", ONES, decay=False, differs=NO_TRAINER),
)


def one(*rows: Row) -> Table:
    return Table(source=MAMBA_1, rows=(*SELECTIVE, *rows), tied=True)


def two(*rows: Row) -> Table:
    return Table(source=MAMBA_2, rows=(*HEADS, *rows), tied=True)


TABLES = {
    "mamba-1": one(*CONVOLUTION, s4d_real(16)),
    "mamba-1 w/o conv": one(s4d_real(16)),
    "mamba-1 state x2": one(*CONVOLUTION, s4d_real(32)),
    "mamba-1 state x4": one(*CONVOLUTION, s4d_real(64)),
    "mamba-1 decay one": one(*CONVOLUTION, ONE_RATE, ONE_STEP),
    "mamba-1 decay none": one(*CONVOLUTION),
    "mamba-1 decay none w/o conv": one(),
    "mamba-1 global selection": Table(source=GLOBAL, rows=LONG, tied=True),
    "mamba-1 global selection lm": Table(source=GLOBAL, rows=LONG, tied=True, layers=4),
    "mamba-2": two(*CONVOLUTION, RATES, GAIN),
    "mamba-2 canon": two(*CONVOLUTION, RATES, GAIN, Row(r"canon_a\.conv\.weight", taps(4))),
    "mamba-2 w/o conv": two(RATES, GAIN),
    "mamba-2 w/o gn": two(*CONVOLUTION, RATES),
    "mamba-2 state x2": two(*CONVOLUTION, RATES, GAIN),
    "mamba-2 state x4": two(*CONVOLUTION, RATES, GAIN),
    "mamba-2 decay one": two(*CONVOLUTION, ONE_RATE, GAIN),
    "mamba-2 decay none": two(*CONVOLUTION, GAIN),
    "mamba-2 decay none w/o conv": two(GAIN),
    "mamba-3": Table(source=MAMBA_3, rows=THREE),
    "mamba-3 mimo": Table(
        source=MAMBA_3,
        rows=(*THREE, Row(r"mixer\.mimo_[xo]", Exactly(0.25)), Row(r"mixer\.mimo_z", ONES)),
    ),
    "mamba-3 w/o rotation": Table(source=MAMBA_3, rows=THREE),
    "mamba-3 w/o trapezoid": Table(source=MAMBA_3, rows=THREE),
    "mamba-3 heavy tail": Table(source=MAMBA_3, rows=THREE),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

"""How the official code starts and trains each parameter of Based and Hyena; see `_published`.

_init_weights of both: nn.Linear std 0.02, biases 0, embedding std 0.02; out_proj.weight and fc2.weight
0.02 / sqrt(2 layers). nn.Conv1d keeps PyTorch's default, uniform within 1 / sqrt(taps). Heads are tied.
"""

import math

import pytest
import torch

from tests.mixers._published import (
    LENGTH,
    ONES,
    ZEROS,
    At,
    Exactly,
    Follows,
    Row,
    Table,
    assert_table_holds,
    normal,
    uniform,
)

BASED = "HazyResearch/based@32c1bd4e09c8f7f718b0ed3f2e0a333908297879"
SAFARI = "HazyResearch/safari@02220c69d247e5473616cd053a443ad99fd2559b"
RMS = "decays those of RMSNorm"
UNDECAYED = "Biases, gains of norms and the skip of the filter do not decay"


def shrunk(at: At) -> Follows:
    return normal(0.02 / math.sqrt(2 * at.depth))


TAPS = uniform(-(3**-0.5), 3**-0.5)

#: param_grouping.py: neither embeddings nor biases decay.
AROUND_BASED = (
    Row(r"embedding\.weight", normal(0.02), decay=False),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False, differs=RMS),
    Row(r"feed_forward\.(gate|up)\.weight", normal(0.02)),
    Row(r"feed_forward\.down\.weight", shrunk),
    Row(r"mixer\.out\.weight", shrunk),
)
BASE_CONV = (
    Row(r"mixer\.in_proj\.weight", normal(0.02)),
    Row(r"mixer\.(in_proj|out)\.bias", ZEROS, decay=False),
    Row(r"mixer\.conv\.weight", TAPS),
)
LINEAR = Row(r"mixer\.qkv\.weight", normal(0.02))
WINDOW = Row(r"mixer\.project\.qkv\.weight", normal(0.02))


def features(at: At) -> Exactly:
    """PositionalEmbedding of emb_dim 33: time, then exp(-i f w) of 16 bands from 1e-4 to 15."""
    time = torch.linspace(0, 1, LENGTH, dtype=torch.float64)[:, None]
    w = 2 * math.pi * torch.arange(LENGTH, dtype=torch.float64)[:, None] / LENGTH
    waves = torch.exp(-1j * torch.linspace(1e-4, 15, 16, dtype=torch.float64) * w)
    return Exactly(torch.cat([time, waves.real, waves.imag], dim=1))


#: The filter's network and features: _optim with weight decay 0 and lr = optimizer.lr, its sines w = 14 (hyena.yaml).
HYENA = (
    Row(r"embedding\.weight", normal(0.02)),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False, differs=UNDECAYED),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.bias", ZEROS, decay=False, differs=UNDECAYED),
    Row(r"(mixer\.in_proj|feed_forward\.up)\.weight", normal(0.02)),
    Row(r"(mixer\.out|feed_forward\.down)\.weight", shrunk),
    Row(
        r"(mixer\.in_proj|mixer\.out|feed_forward\.up|feed_forward\.down)\.bias", ZEROS, decay=False, differs=UNDECAYED
    ),
    Row(r"mixer\.conv\.weight", TAPS),
    Row(r"mixer\.conv\.bias", TAPS, decay=False, differs=UNDECAYED),
    Row(r"mixer\.filter\.positions", features, decay=False),
    Row(r"mixer\.filter\.(first|inner\.[01]|last)\.weight", normal(0.02), decay=False),
    Row(r"mixer\.filter\.(first|inner\.[01])\.bias", ZEROS, decay=False),
    Row(r"mixer\.filter\.frequency", Exactly(14.0), decay=False),
    Row(r"mixer\.filter\.skip", normal(1.0), decay=False, differs=UNDECAYED),
)

TABLES = {
    "based": Table(
        source=f"{BASED}: train/configs/experiment/example/based-360m.yaml, based/models/gpt.py, "
        "based/models/mixers/slide_attention.py, train/optim/param_grouping.py",
        rows=(*AROUND_BASED, *BASE_CONV, LINEAR, WINDOW),
        tied=True,
    ),
    "based linear": Table(
        source=f"{BASED}: based/models/gpt.py, based/models/mixers/linear_attention.py",
        rows=(*AROUND_BASED, LINEAR),
        tied=True,
    ),
    "based conv": Table(
        source=f"{BASED}: based/models/gpt.py, based/models/mixers/convolution.py",
        rows=(*AROUND_BASED, *BASE_CONV),
        tied=True,
    ),
    "hyena": Table(
        source=f"{SAFARI}: configs/experiment/pile/hyena.yaml, src/models/sequence/hyena.py, "
        "src/models/sequence/long_conv_lm.py, train.py",
        rows=HYENA,
        tied=True,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

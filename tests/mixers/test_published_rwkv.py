"""How RWKV's official trainers start and train each parameter; see `_published`."""

import math

import pytest
import torch

from tests.mixers._published import ONES, ZEROS, At, Exactly, Orthogonal, Row, Table, assert_table_holds, uniform

COMMIT = "BlinkDL/RWKV-LM@524481d5099b38d9bc8ef1e89209161b86c8011b"

#: generate_init_weight and configure_optimizers of all generations: matrices named `.weight` decay, nothing else does.
#: LayerNorms are nn.LayerNorm's. emb.weight: uniform in +-1e-4; head.weight: orthogonal, gain 0.5 sqrt(V / D).
AROUND = (
    Row(r"embedding\.weight", uniform(-1e-4, 1e-4)),
    Row(r"head\.weight", Orthogonal(0.5 * math.sqrt(160 / 128))),
    Row(r"(embedding_norm|norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False),
    Row(r"(embedding_norm|norm|mixer_norm|feed_forward_norm)\.bias", ZEROS, decay=False),
)


def previous(power, extra=lambda at: 0.0):
    """A share of the previous token: 1 - (i / D)^power - extra. RWKV-4 and 5 store its complement as time_mix_*."""
    return lambda at: Exactly(1 - at.channel ** power(at) - extra(at))


def ratio(at: At) -> float:
    return at.fall


def half(at: At) -> float:
    return 0.5 * at.fall


def value_extra(at: At) -> float:
    return 0.3 * at.rise


#: RWKV_ChannelMix, RWKV_CMix_x052, RWKV_CMix_x060; zero in generate_init_weight: .ffn.value., .ffn.receptance.
GATED_CHANNEL_MIX = (
    Row(r"feed_forward\.value\.weight", ZEROS),
    Row(r"feed_forward\.receptance\.weight", ZEROS),
)

#: RWKV_Tmix_x052 and RWKV_Tmix_x060. generate_init_weight: .att.output. zero, .att.key. and .att.gate. orthogonal with
#: gain 0.1, other matrices with gain 1; ln_x.weight is ((1 + l) / L)^0.7.
GATED_TIME_MIX = (
    Row(r"mixer\.(receptance|value)\.weight", Orthogonal(1.0)),
    Row(r"mixer\.(key|gate)\.weight", Orthogonal(0.1)),
    Row(r"mixer\.output\.weight", ZEROS),
    Row(r"mixer\.norm\.weight", lambda at: Exactly(((1 + at.index) / at.depth) ** 0.7), decay=False),
    Row(r"mixer\.norm\.bias", ZEROS, decay=False),
)


def decay_speed(at: At) -> Exactly:
    return Exactly(-6 + 5 * at.line ** (0.7 + 1.3 * at.rise))


def faaaa(at: At) -> Exactly:
    zigzag = torch.tensor([(n + 1) % 3 - 1 for n in range(at.hidden)]) * 0.1
    return Exactly(at.rise * (1 - at.line) + zigzag)


def zigzag(at: At, head: int = 64) -> torch.Tensor:
    place = (torch.arange(at.hidden, dtype=torch.float64) % head - (head - 1) / 2) / ((head - 1) / 2)
    return place * place.abs()


def small_uniform(at: At):
    return uniform(-0.01, 0.01)


TABLES = {
    # RWKV_TimeMix; without "r" in RWKV_MY_TESTING .att.key. and .att.receptance. start at zero too. Tall orthogonal
    # matrices have gain sqrt(rows / columns). layerwise_lr: time_decay twice, time_first three times.
    "rwkv-4": Table(
        source=f"{COMMIT}: RWKV-v4neo/src/model.py",
        rows=(
            Row(r"embedding\.weight", uniform(-1e-4, 1e-4), differs="starts uniform in ±1e-4"),
            *AROUND[1:],
            Row(r"mixer\.share_k", previous(ratio), decay=False),
            Row(r"mixer\.share_v", previous(ratio, value_extra), decay=False),
            Row(r"mixer\.share_r", previous(half), decay=False),
            Row(r"mixer\.decay", lambda at: Exactly(-5 + 8 * at.line ** (0.7 + 1.3 * at.rise)), lr=2.0, decay=False),
            Row(
                r"mixer\.bonus",
                lambda at: Exactly(math.log(0.3) + 0.5 * torch.tensor([(n + 1) % 3 - 1 for n in range(at.hidden)])),
                lr=3.0,
                decay=False,
            ),
            Row(r"mixer\.(key|receptance|output)\.weight", ZEROS),
            Row(r"mixer\.value\.weight", Orthogonal(1.0)),
            Row(r"feed_forward\.share_[kr]", previous(ratio), decay=False),
            Row(r"feed_forward\.key\.weight", Orthogonal(math.sqrt(2))),
            *GATED_CHANNEL_MIX,
        ),
    ),
    # RWKV_Tmix_x052, RWKV_CMix_x052. layerwise_lr: time_decay twice.
    "rwkv-5": Table(
        source=f"{COMMIT}: RWKV-v5/src/model.py",
        rows=(
            *AROUND,
            Row(r"mixer\.share_k", previous(ratio), decay=False),
            Row(r"mixer\.share_v", previous(ratio, value_extra), decay=False),
            Row(r"mixer\.share_[rg]", previous(half), decay=False),
            Row(r"mixer\.decay", decay_speed, lr=2.0, decay=False),
            Row(r"mixer\.bonus", faaaa, decay=False),
            *GATED_TIME_MIX,
            Row(r"feed_forward\.share_[kr]", previous(ratio), decay=False),
            Row(r"feed_forward\.key\.weight", Orthogonal(1.0)),
            *GATED_CHANNEL_MIX,
        ),
    ),
    # RWKV_Tmix_x060, RWKV_CMix_x060. time_maa_w2 and time_decay_w2 are uniform in +-0.01, their _w1 zero.
    "rwkv-6": Table(
        source=f"{COMMIT}: RWKV-v5/src/model.py",
        rows=(
            *AROUND,
            Row(r"mixer\.share_[xwk]", previous(ratio), decay=False),
            Row(r"mixer\.share_v", previous(ratio, value_extra), decay=False),
            Row(r"mixer\.share_[rg]", previous(half), decay=False),
            Row(r"mixer\.(mix_down|decay\.down)", ZEROS, decay=False),
            Row(r"mixer\.(mix_up|decay\.up)", small_uniform, decay=False),
            Row(r"mixer\.decay\.base", decay_speed, lr=2.0, decay=False),
            Row(r"mixer\.bonus", faaaa, decay=False),
            *GATED_TIME_MIX,
            Row(r"feed_forward\.share_[kr]", previous(lambda at: at.fall**3), decay=False),
            Row(r"feed_forward\.key\.weight", Orthogonal(1.0)),
            *GATED_CHANNEL_MIX,
        ),
    ),
    # RWKV_Tmix_x070, RWKV_CMix_x070, then generate_init_weight (train.py calls it), which sets every matrix named
    # `.weight` anew: orthogonal with gain 1, .att.key. 0.1, .att.output. and .ffn.value. zero. Only att.w0 learns twice
    # as fast.
    "rwkv-7": Table(
        source=f"{COMMIT}: RWKV-v7/train_temp/src/model.py, RWKV-v7/train_temp/train.py",
        rows=(
            *AROUND,
            Row(r"mixer\.share_[rg]", previous(lambda at: 0.2 * at.fall), decay=False),
            Row(r"mixer\.share_[wa]", previous(lambda at: 0.9 * at.fall), decay=False),
            Row(r"mixer\.share_[kv]", previous(lambda at: 0.7 * at.fall), decay=False),
            Row(r"mixer\.(decay|rate|first|gate)\.down", ZEROS, decay=False),
            Row(r"mixer\.(decay|rate|first|gate)\.up", Orthogonal(0.1), decay=False),
            Row(
                r"mixer\.decay\.base",
                lambda at: Exactly(-6 + 6 * at.line ** (1 + at.rise**0.3) + 0.5 + 2.5 * zigzag(at)),
                lr=2.0,
                decay=False,
            ),
            Row(
                r"mixer\.rate\.base",
                lambda at: Exactly(-0.19 + 0.3 * zigzag(at) + 0.4 * (at.line - 0.5)),
                decay=False,
            ),
            Row(r"mixer\.first\.base", lambda at: Exactly(0.73 - 0.4 * (at.line - 0.5)), decay=False),
            Row(r"mixer\.removal", lambda at: Exactly(0.71 - 0.1 * (at.line - 0.5)), decay=False),
            Row(r"mixer\.replacement", Exactly(1.02), decay=False),
            Row(r"mixer\.bonus", Exactly(-0.04), decay=False),
            Row(r"mixer\.(receptance|value)\.weight", Orthogonal(1.0)),
            Row(r"mixer\.key\.weight", Orthogonal(0.1)),
            Row(r"mixer\.output\.weight", ZEROS),
            *GATED_TIME_MIX[-2:],
            Row(r"feed_forward\.share_k", previous(lambda at: at.fall**4), decay=False),
            Row(r"feed_forward\.key\.weight", Orthogonal(1.0)),
            Row(r"feed_forward\.value\.weight", ZEROS),
        ),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

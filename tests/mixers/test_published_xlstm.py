"""How xlstm-jax starts each parameter of the mLSTM models; see `_published`.

mLSTMv1_default: small_init for embedding, head, queries, keys, values and what enters a feed-forward layer, wang
for what writes to the residual stream; layer_v1: gates and output gate are zeros, their biases -10 and linspace(3, 6).
configs/optimizer/adamw.yaml decays kernels alone.
"""

import math

import pytest
import torch

from tests.mixers._published import ONES, ZEROS, At, Exactly, Follows, Row, Table, assert_table_holds, normal

SOURCE = (
    "NX-AI/xlstm-jax@5333dc1bad5d9f178cbe673d0ee1968118dc271c: configs/model/mLSTMv1_default.yaml, "
    "configs/model/mLSTMv1_165M.yaml, xlstm_jax/models/xlstm_parallel/blocks/mlstm/layer_v1.py"
)


def small(at: At) -> Follows:
    """small_init of the model's width."""
    return normal(math.sqrt(2 / (5 * at.hidden)))


def wang(at: At) -> Follows:
    """wang_init of the model's width and number of blocks."""
    return normal(2 / (at.depth * math.sqrt(at.hidden)))


TABLES = {
    "mlstm": Table(
        source=SOURCE,
        rows=(
            Row(r"embedding\.weight", small, decay=False),
            Row(r"head\.weight", small),
            Row(r"(norm|mixer_norm|feed_forward_norm)\.weight|mixer\.norm_weight", ONES, decay=False),
            Row(r"mixer\.qkv\.weight|feed_forward\.(gate|up)\.weight", small),
            Row(r"(mixer\.out|feed_forward\.down)\.weight", wang),
            Row(r"mixer\.(gates|output_gate)\.weight", ZEROS),
            Row(r"mixer\.input_bias", Exactly(-10.0), decay=False),
            Row(r"mixer\.forget_bias", Exactly(torch.tensor([3.0, 4.0, 5.0, 6.0])), decay=False),
        ),
    )
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

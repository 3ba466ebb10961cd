"""How the Forgetting Transformer starts each parameter; see `_published`.

_init_weights: every nn.Linear and nn.Embedding normal, std initializer_range = 0.02, output projections too; biases 0.
RMSNorm and GroupNorm start at 1. lm_head is a layer of its own.
"""

import pytest

from tests.mixers._published import ONES, ZEROS, Row, Table, assert_table_holds, normal

FILES = (
    "zhixuan-lin/forgetting-transformer@246d5e3f9c608d7a32141ba642bbb6babec5a35d: "
    "src/forgetting_transformer/model/forgetting_transformer/modeling_forgetting_transformer.py, "
    "configs/experiment/longcrawl64/forgetting_transformer"
)
COMMON = (
    Row(r"(embedding|head)\.weight", normal(0.02)),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False),
    Row(r"mixer\.(qkv|forget|out)\.weight", normal(0.02)),
    Row(r"mixer\.forget\.bias", ZEROS, decay=False),
    Row(r"feed_forward\.(gate|up|down)\.weight", normal(0.02)),
)
PRO = (
    Row(r"mixer\.(shift|gate)\.weight", normal(0.02)),
    Row(r"mixer\.(q_gain|k_gain|norm_weight)", ONES, decay=False),
)

TABLES = {
    "fox": Table(source=f"{FILES}/llama_125m_2b.yaml", rows=COMMON),
    "fox pro": Table(source=f"{FILES}/pro_125m_2b.yaml", rows=(*COMMON, *PRO)),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

"""How fla starts each parameter of Native Sparse Attention, and transformers DSA's indexer; see `_published`.

fla's _init_weights: every nn.Linear and nn.Embedding normal, std initializer_range = 0.02, output projections too:
prenorm_residual_strategy is None. RMSNorms start at 1. tie_word_embeddings is False.
transformers' _init_weights: nn.Linear normal, std initializer_range = 0.02; LayerNorm 1 and 0.
"""

import pytest

from tests.mixers._published import ONES, ZEROS, Row, Table, assert_table_holds, normal
from tests.mixers.test_published_attention import PLAIN

COMMIT = "fla-org/flash-linear-attention@bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"
UNDECAYED = "Gains of norms do not decay"

INDEXER = (
    Row(r"mixer\.index_(q|k|weights)\.weight", normal(0.02)),
    Row(r"mixer\.index_norm\.weight", ONES, decay=False),
    Row(r"mixer\.index_norm\.bias", ZEROS, decay=False),
)
DSA = (
    "huggingface/transformers@v5.24.0: src/transformers/models/deepseek_v32/modular_deepseek_v32.py for the indexer; "
    "for the rest our choice, as for transformer++"
)

TABLES = {
    "dsa": Table(source=DSA, rows=(*PLAIN.rows, *INDEXER), tied=True),
    "dsa by mass": Table(source=DSA, rows=PLAIN.rows, tied=True),
    "nsa": Table(
        source=f"{COMMIT}: fla/layers/nsa.py, fla/models/nsa/modeling_nsa.py, fla/ops/nsa/naive.py",
        rows=(
            Row(r"(embedding|head)\.weight", normal(0.02)),
            Row(r"(norm|mixer_norm|feed_forward_norm)\.weight", ONES, decay=False, differs=UNDECAYED),
            Row(r"mixer\.(project\.qkv|branches|out)\.weight", normal(0.02)),
            Row(r"feed_forward\.(gate|up|down)\.weight", normal(0.02)),
        ),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

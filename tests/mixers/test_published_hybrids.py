"""How each parameter of hybrids of three recurrent layers and one of attention starts and trains; see `_published`.

Their layers are those of kda, gated-deltanet and attention: the tables state that they start as these do, the attention
as in transformer++, our choice, in the backbone of the recurrent ones.
"""

import math

import pytest

from tests.mixers._published import ONES, At, Follows, Row, Table, assert_table_holds, normal
from tests.mixers.test_published_delta import CHANNEL_GATES, COMMON, GATES


def out(at: At) -> Follows:
    """The fourth layer of each is attention, whose projection is shrunk with depth."""
    return normal(0.02 / math.sqrt(2 * at.depth) if at.index % 4 == 3 else 0.02)


SHARED = (
    *COMMON,
    Row(r"mixer\.memory\.conv\.weight", normal(0.02)),
    Row(r"mixer\.project\.qkv\.weight", normal(0.02)),
    Row(r"mixer\.out\.weight", out),
)

TABLES = {
    "kda 3:1": Table(
        source="MoonshotAI/Kimi-Linear@858dba5: README.md, tech_report.pdf", rows=(*SHARED, *CHANNEL_GATES), layers=4
    ),
    "olmo-hybrid": Table(
        source="allenai/OLMo-core@fa6c501: src/scripts/official/OLMo-hybrid/OLMo-hybrid-7B-pretrain.py",
        rows=(*SHARED, *GATES),
        layers=4,
    ),
    "qwen3-next": Table(
        source="huggingface/transformers@008e574: src/transformers/models/qwen3_next/configuration_qwen3_next.py",
        rows=(*SHARED, *GATES, Row(r"mixer\.project\.[qk]_gain", ONES, decay=False)),
        layers=4,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

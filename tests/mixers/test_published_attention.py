"""How each parameter of softmax attention and its relatives starts and trains; see `_published`.

The authors of transformer++, of Top-1 selection and of constant keys (arXiv 2505.18522) publish no code and name no
initial values, no weight decay: these tables state our choice, GPT-2's, and that all of them share it.
"""

import math

import pytest

from tests.mixers._published import ONES, ZEROS, At, Follows, Row, Table, assert_table_holds, normal, uniform


def shrunk(at: At) -> Follows:
    """Two projections per block write into the residual stream (Radford et al. 2019, section 2.3)."""
    return normal(0.02 / math.sqrt(2 * at.depth))


def rms(sort: str = r"(norm|mixer_norm|feed_forward_norm)\.weight") -> Row:
    return Row(sort, ONES, decay=False)


GATED = (
    Row(r"embedding\.weight", normal(0.02)),
    Row(r"mixer\.out\.weight", shrunk),
    Row(r"feed_forward\.(gate|up)\.weight", normal(0.02)),
    Row(r"feed_forward\.down\.weight", shrunk),
    rms(),
)
QKV = Row(r"mixer\.project\.qkv\.weight", normal(0.02))
CONSTANT = normal(0.02 * math.sqrt(128))

OURS = "our choice: the authors of arXiv 2505.18522 publish no code and name no initial values"
TOP_1 = "our choice: the authors publish no code and name no initial values"

LAYER_NORMS_AND_BIASES = (
    rms(),
    Row(r"(norm|mixer_norm|feed_forward_norm)\.bias", ZEROS, decay=False),
    Row(r"(mixer\.project\.qkv|mixer\.out|feed_forward\.up|feed_forward\.down)\.bias", ZEROS, decay=False),
)

#: openai/gpt-2, src/model.py: wpe std 0.01, wte and w of conv1d std 0.02, b 0, g 1.
GPT_2 = (
    Row(r"embedding\.weight", normal(0.02), differs="Weight decay is not published"),
    Row(r"positions\.weight", normal(0.01), differs="Weight decay is not published"),
    Row(r"(mixer\.project\.qkv|feed_forward\.up)\.weight", normal(0.02)),
    Row(r"(mixer\.out|feed_forward\.down)\.weight", shrunk, differs="are shrunk by the square root of their number"),
    *LAYER_NORMS_AND_BIASES,
)


def small(at: At) -> Follows:
    """small_init_init_method."""
    return normal(math.sqrt(2 / (5 * at.hidden)))


def wang(at: At) -> Follows:
    """wang_init_method."""
    return normal(2 / at.depth / math.sqrt(at.hidden))


#: configs/pythia/160M.yml: init_method small_init, for the embedding and the untied head too, output_layer_init_method
#: wang_init; get_params_for_weight_decay_optimization: neither norms nor biases decay.
NEOX = (
    Row(r"(embedding|head|mixer\.project\.qkv|feed_forward\.up)\.weight", small),
    Row(r"(mixer\.out|feed_forward\.down)\.weight", wang),
    *LAYER_NORMS_AND_BIASES,
)

PLAIN = Table(source=OURS, rows=(*GATED, QKV), tied=True)

#: The gate is a part of q_proj, which starts as every matrix; gains of Qwen3RMSNorm start at 1.
GATE = Row(r"mixer\.gate\.weight", normal(0.02))
GATED_SOURCE = (
    "qiuzh20/gated_attention@df42212f08f0ab69d3b26956d61feff730dc3804: modeling_qwen3.py for the gate and the gains of "
    "queries and keys; for the rest our choice, as for transformer++"
)

CANON_SOURCE = (
    "facebookresearch/PhysicsLM4@924678beb29b862c5e87b9bce73059b2fe02db09: lingua_modified/lingua/canon_helper.py, "
    "lingua_modified/lingua/transformer.py for Canon layers; for the rest our choice, as for transformer++"
)


def canon(places: str) -> Row:
    """reset_parameters of nn.Conv1d, with one channel and four taps per group; everything decays there."""
    return Row(rf"({places})\.conv\.weight", uniform(-0.5, 0.5))


CANON = canon(r"canon_a|mixer\.project\.canon|canon_c|feed_forward\.canon")

TABLES = {
    "transformer++ canon-a": Table(source=CANON_SOURCE, rows=(*PLAIN.rows, canon("canon_a")), tied=True),
    "transformer++ canon": Table(source=CANON_SOURCE, rows=(*PLAIN.rows, CANON), tied=True),
    "top1-chunk-exact canon": Table(source=TOP_1, rows=(*PLAIN.rows, CANON), tied=True),
    "transformer++": PLAIN,
    "transformer++ ngram": Table(
        source="our choice, as a control: one table of 32,768 rows, for n-grams of one length; the paper adds up "
        "tables with millions of rows, for several lengths",
        rows=(*PLAIN.rows, Row(r"ngrams\.table\.weight", normal(0.02), lr=10.0, decay=False)),
        tied=True,
    ),
    "transformer++ gated": Table(source=GATED_SOURCE, rows=(*PLAIN.rows, GATE), tied=True),
    "transformer++ qk-norm gated": Table(
        source=GATED_SOURCE,
        rows=(*PLAIN.rows, GATE, Row(r"mixer\.project\.[qk]_gain", ONES, decay=False)),
        tied=True,
    ),
    "transformer++ window": PLAIN,
    "transformer++ no position": PLAIN,
    "transformer++ temperature": PLAIN,
    "transformer++ alibi": Table(
        source="ofirpress/attention_with_linear_biases@4b92f28a005ead2567abe2359f633e73e08f3833: "
        "fairseq/models/transformer.py for the slopes; for the rest our choice, as for transformer++",
        rows=PLAIN.rows,
        tied=True,
    ),
    "transformer++ absolute": Table(
        source=OURS, rows=(*PLAIN.rows, Row(r"positions\.weight", normal(0.01))), tied=True
    ),
    "transformer++ random k": Table(
        source=OURS,
        rows=(*GATED, Row(r"mixer\.(query|value)\.weight", normal(0.02)), Row(r"mixer\.keys", CONSTANT)),
        tied=True,
    ),
    "transformer++ random qk": Table(
        source=OURS,
        rows=(*GATED, Row(r"mixer\.value\.weight", normal(0.02)), Row(r"mixer\.(queries|keys)", CONSTANT)),
        tied=True,
    ),
    "top1-element": Table(source=TOP_1, rows=PLAIN.rows, tied=True),
    "top1-chunk-exact": Table(source=TOP_1, rows=PLAIN.rows, tied=True),
    "top1-chunk-approx": Table(source=TOP_1, rows=PLAIN.rows, tied=True),
    "transformer": Table(
        source="openai/gpt-2@9b63575ef42771a015060c964af2c3da4cf7c8ab: src/model.py", rows=GPT_2, tied=True
    ),
    "pythia": Table(
        source="EleutherAI/gpt-neox@ea7aefd8f8e183256992d9fede4d7c71a46d67a5: configs/pythia/160M.yml, "
        "megatron/model/init_functions.py, megatron/model/utils.py",
        rows=NEOX,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_starts_and_trains_as_published(name: str):
    assert_table_holds(name, TABLES[name])

"""How many parameters the published sizes have: vocabulary 32,000, "110M" is hidden 768, "1.3B" hidden 2048."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import plan_runs
from basecap.study.config import load_study
from basecap.study.study_file import library

VOCAB = 32_000
HEADS = {768: 12, 2048: 16}


def build(use: str, hidden: int, **options) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(model_config(use, hidden=hidden, **{"vocab": VOCAB, **options}))


#: Name, parameters in millions at hidden 768 and 2048 with a tied head.
SIZES = [
    ("transformer", 111.2, 1278.3),
    ("transformer++", 109.5, 1279.9),
    ("transformer++ window", 109.5, 1279.9),
    ("transformer++ gated", 109.5, 1276.7),
    ("transformer++ qk-norm gated", 109.5, 1276.7),
    ("top1-element", 109.5, 1279.9),
    ("top1-chunk-exact", 109.5, 1279.9),
    ("top1-chunk-approx", 109.5, 1279.9),
    ("mamba-1", 115.1, 1334.7),
    ("mamba-2", 114.9, 1306.3),
    ("mamba-3", 127.1, 1505.2),
    ("mamba-3 mimo", 127.5, 1441.5),
    ("mlstm", 109.6, 1280.3),
    ("based", 121.1, 1431.3),
    ("rwkv-4", 88.4, 972.1),
    ("rwkv-5", 116.7, 1374.9),
    ("rwkv-6", 120.9, 1397.0),
    ("rwkv-7", 114.9, 1327.7),
    ("deltanet", 109.7, 1281.3),
    ("gated-deltanet", 123.9, 1482.4),
    ("fox", 109.6, 1281.5),
    ("fox pro", 109.9, 1281.6),
    ("kda", 114.4, 1306.5),
    ("gated-deltanet-2", 128.5, 1507.1),
    ("nsa", 109.9, 1284.6),
    ("dsa", 112.5, 1295.8),
    ("dsa by mass", 109.5, 1279.9),
    ("pythia", 81.3, 1274.1),
]


@pytest.mark.parametrize(("use", "small", "large"), SIZES)
def test_published_sizes(use: str, small: float, large: float):
    counts = [build(use, hidden, tied=True).parameters_count() / 1e6 for hidden in (768, 2048)]
    assert [round(count, 1) for count in counts] == [small, large]


def their_transformer(hidden: int, layers: int) -> int:
    config = GPT2Config(vocab_size=VOCAB, n_embd=hidden, n_layer=layers, n_head=HEADS[hidden], n_positions=2048)
    return GPT2LMHeadModel(config).num_parameters()


def their_pythia(hidden: int, layers: int) -> int:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS[hidden],
        intermediate_size=4 * hidden,
    )
    return GPTNeoXForCausalLM(config).num_parameters()


def their_mamba_1(hidden: int, layers: int) -> int:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=True)
    return MambaForCausalLM(config).num_parameters()


def their_mamba_2(hidden: int, layers: int) -> int:
    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_heads=hidden // 32,
        n_groups=1,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    return Mamba2ForCausalLM(config).num_parameters()


@pytest.mark.parametrize(
    ("use", "theirs", "layers"),
    [
        ("transformer", their_transformer, {768: 12, 2048: 24}),
        ("pythia", their_pythia, {768: 8, 2048: 24}),
        ("mamba-1", their_mamba_1, {768: 24, 2048: 48}),
        ("mamba-2", their_mamba_2, {768: 24, 2048: 48}),
    ],
)
@pytest.mark.parametrize("hidden", [768, 2048])
def test_as_many_as_transformers_builds(use: str, theirs, layers: dict[int, int], hidden: int):
    with torch.device("meta"):
        expected = theirs(hidden, layers[hidden])
    assert build(use, hidden).parameters_count() == expected


@pytest.mark.parametrize(("use", "millions"), [("rwkv-5", 116.6), ("rwkv-6", 120.7), ("rwkv-7", 114.8)])
def test_matrices_of_rwkv(use: str, millions: float):
    """The figures that are quoted for these models count matrices alone, without norms, shares, decays and bonuses."""
    model = build(use, 768, tied=True)
    vectors = sum(p.numel() for p in model.parameters() if p.numel() <= 768)
    assert round((model.parameters_count() - vectors) / 1e6, 1) == millions


@pytest.mark.parametrize("use", ["transformer++", "transformer++ window", "top1-chunk-exact", "top1-chunk-approx"])
def test_the_body_of_rwkv_7_of_135_million(use: str):
    """Attention instead of RWKV-7's mixing; the figure is with an untied head."""
    count = build(use, 768, backbone="rwkv-7").parameters_count()
    assert build(use, 768, backbone="rwkv-7", tied=True).parameters_count() == count - 768 * VOCAB
    assert round(count / 1e6, 1) == 134.1


def test_the_pythia_of_133_million():
    """The second paper's figure is with Pythia's own vocabulary and an untied head."""
    assert build("pythia", 768, vocab=50_304).parameters_count() // 1_000_000 == 133
    # EleutherAI/pythia-160m, of which it keeps 8 layers of 12.
    assert build("pythia", 768, vocab=50_304, layers=12).parameters_count() == 162_322_944


def test_the_hyena_of_153_million():
    model = build("hyena", 864, vocab=50_257)
    assert (model.config.depth, model.parameters_count() // 1_000_000) == (18, 153)
    (run,) = [run for run in plan_runs(load_study("lp-figure-11"), vocab=512) if run.architecture == "hyena"]
    assert (run.model.depth, run.model.hidden) == (18, 864)


@pytest.mark.parametrize("vocab", [20_000, 32_000, 50_277])
@pytest.mark.parametrize("tied", [True, False])
def test_the_rwkv_4_that_is_not_153_million(vocab: int, tied: bool):
    """The second paper's 153M names neither vocabulary nor head, and none of the papers' vocabularies gives it.

    Its width and depth have 113.4M parameters besides; what is left to 153M would be 38,700 tokens, or 19,300 untied.
    """
    count = build("rwkv-4", 1024, vocab=vocab, tied=tied).parameters_count()
    assert count == 113_385_472 + 1024 * vocab * (1 if tied else 2)
    assert count // 1_000_000 != 153


@pytest.mark.parametrize("name", library())
def test_models_of_a_study_are_all_tied_or_none(name: str):
    study = load_study(name)
    on_tasks = study.task is not None
    assert study.model.tied == (not on_tasks and name not in ("bc-figure-7", "bc-table-3"))
    assert {run.model.tied for run in plan_runs(study, vocab=512)} == {study.model.tied}


@pytest.mark.parametrize(
    ("use", "tied"),
    [
        ("transformer", True),  # openai/gpt-2: model.py multiplies by wte
        ("pythia", False),  # EleutherAI/gpt-neox: configs/pythia, no_weight_tying
        ("mamba-1", True),  # state-spaces/mamba: config_mamba.py
        ("based", True),  # HazyResearch/based: models/gpt.py
        ("hyena", True),  # HazyResearch/safari: long_conv_lm.py
        ("rwkv-4", False),  # BlinkDL/RWKV-LM: model.py of every generation
        ("rwkv-5", False),
        ("rwkv-6", False),
        ("rwkv-7", False),
        ("deltanet", False),  # fla-org/flash-linear-attention: configuration_delta_net.py
        ("gated-deltanet", False),
        ("mlstm", False),  # NX-AI/xlstm-jax: mLSTMv1_default.yaml
        ("nsa", False),
        ("fox", False),  # zhixuan-lin/forgetting-transformer: modeling_forgetting_transformer.py
    ],
)
def test_heads_are_tied_where_published_so(use: str, tied: bool):
    assert model_config(use, hidden=64, vocab=32).tied == tied

"""Softmax attention: parity with transformers' modules, options, the ring cache, bad options."""

import pytest
import torch
from transformers import GPT2Config, GPTNeoXConfig, GptOssConfig, Qwen3NextConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec
from basecap.mixers.attention import alibi_slopes
from basecap.ops.attention import entropy
from basecap.testing.check_mixer import check_mixer
from tests.mixers._built import built, draw

HIDDEN, HEADS, T = 64, 4, 21


def build(name="transformer++", hidden=HIDDEN, **options):
    return built(name, hidden, 0.2, **{"heads": HEADS, **options})


def causal_mask():
    return torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def assert_parity(ours, theirs, pairs, **tolerance):
    """Compare outputs, and gradients of the parameters in `pairs` (ours, theirs, theirs -> ours) and of the input."""
    assert len(pairs) == len(list(ours.parameters()))
    x = draw(2, T, HIDDEN).requires_grad_()
    weight = draw(2, T, HIDDEN, seed=1)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected, **tolerance)
    grads = torch.autograd.grad((y * weight).sum(), [x, *(own for own, _, _ in pairs)])
    others = torch.autograd.grad((expected * weight).sum(), [x, *(other for _, other, _ in pairs)])
    convert = [lambda g: g, *(turn for _, _, turn in pairs)]
    for grad, other, turn in zip(grads, others, convert, strict=True):
        torch.testing.assert_close(grad, turn(other), **tolerance)


def test_transformer_is_gpt2():
    ours = build("transformer")
    config = GPT2Config(n_embd=HIDDEN, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")
    theirs = GPT2Attention(config, layer_idx=0).double()
    pairs = [
        (ours.project.qkv.weight, theirs.c_attn.weight, torch.t),
        (ours.project.qkv.bias, theirs.c_attn.bias, torch.clone),
        (ours.out.weight, theirs.c_proj.weight, torch.t),
        (ours.out.bias, theirs.c_proj.bias, torch.clone),
    ]
    with torch.no_grad():
        for own, other, turn in pairs:
            own.copy_(turn(other) + 0.1 * draw(*own.shape))
            other.copy_(turn(own))
    assert_parity(ours, lambda x: theirs(x, attention_mask=causal_mask())[0], pairs)


def test_pythia_is_gpt_neox():
    ours = build("pythia")
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    theirs = GPTNeoXAttention(config, layer_idx=0).double()
    rotary = GPTNeoXRotaryEmbedding(config)

    def by_kind(x):
        """[heads, (q, k, v), dim, ...] -> [(q, k, v), heads, dim, ...], both flattened."""
        return x.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)

    pairs = [
        (ours.project.qkv.weight, theirs.query_key_value.weight, by_kind),
        (ours.project.qkv.bias, theirs.query_key_value.bias, by_kind),
        (ours.out.weight, theirs.dense.weight, torch.clone),
        (ours.out.bias, theirs.dense.bias, torch.clone),
    ]
    with torch.no_grad():
        for own, other, turn in pairs:
            other += 0.1 * draw(*other.shape)
            own.copy_(turn(other))

    def forward(x):
        # Their tables are float32; the same in float64.
        positions = torch.arange(T, dtype=torch.float64)
        angles = positions[:, None] * torch.tensor([1.0, 0.01, 1.0, 0.01], dtype=torch.float64)
        tables = (angles.cos()[None], angles.sin()[None])
        torch.testing.assert_close(rotary(x, positions[None]), tables, rtol=1e-5, atol=1e-5)
        return theirs(x, attention_mask=causal_mask(), position_embeddings=tables)[0]

    # Their softmax is float32 whatever comes in.
    assert_parity(ours, forward, pairs, rtol=1e-5, atol=1e-5)


def rotations():
    """Return the tables that transformers rotates heads of 16 channels by, in float64."""
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    return tuple(torch.cat([table, table], dim=-1)[None] for table in (angles.cos(), angles.sin()))


SMALL = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "attention_bias": False,
    "attn_implementation": "eager",
    "num_hidden_layers": 1,
}


def test_gated_attention_with_gains_is_that_of_qwen3_next():
    ours = build("transformer++ qk-norm gated", kv_heads=2)
    theirs = Qwen3NextAttention(Qwen3NextConfig(**SMALL), layer_idx=0).double()
    q, k, v = ours.project.qkv.weight.detach().split([HIDDEN, HIDDEN // 2, HIDDEN // 2])
    # Each head's queries, then its gate; gains are stored less 1.
    q_and_gate = torch.cat([x.unflatten(0, (HEADS, -1)) for x in (q, ours.gate.weight.detach())], dim=1).flatten(0, 1)
    given = {
        "q_proj.weight": q_and_gate,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "o_proj.weight": ours.out.weight.detach(),
        "q_norm.weight": ours.project.q_gain.detach() - 1,
        "k_norm.weight": ours.project.k_gain.detach() - 1,
    }
    theirs.load_state_dict(given)
    assert_same_gradients(ours, lambda x: theirs(x, rotations(), causal_mask())[0])


def test_sinks_are_those_of_gpt_oss():
    ours = build(kv_heads=2, sinks=True)
    theirs = GptOssAttention(GptOssConfig(**SMALL), layer_idx=0).double()
    q, k, v = ours.project.qkv.weight.detach().split([HIDDEN, HIDDEN // 2, HIDDEN // 2])
    given = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": ours.out.weight.detach()}
    theirs.load_state_dict({f"{name}.weight": value for name, value in given.items()} | {"sinks": ours.sinks.detach()})
    cos, sin = (table[..., :8] for table in rotations())  # of one half
    assert_same_gradients(ours, lambda x: theirs(x, (cos, sin), causal_mask())[0], (ours.sinks, theirs.sinks))


def assert_same_gradients(ours, theirs, parameters=()):
    """Compare outputs and gradients, of the input and of one parameter each, to the float32 of their norm."""
    x = draw(2, T, HIDDEN).requires_grad_()
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    weight = draw(2, T, HIDDEN, seed=1)
    grads = [
        torch.autograd.grad((out * weight).sum(), [x, *parameters[number : number + 1]])
        for number, out in enumerate((y, expected))
    ]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_window_that_covers_everything_is_full_attention():
    x = draw(2, T, HIDDEN)
    assert torch.equal(build(window=T)(x), build()(x))
    assert not torch.allclose(build(window=T - 1)(x), build()(x))


def test_grouped_heads_equal_repeated_ones():
    grouped, full = build(kv_heads=2), build()
    q, k, v = grouped.project.qkv.weight.detach().split([HIDDEN, HIDDEN // 2, HIDDEN // 2])
    repeat = [w.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1) for w in (k, v)]
    full.project.qkv.weight.data = torch.cat([q, *repeat])
    full.out.load_state_dict(grouped.out.state_dict())
    x = draw(2, T, HIDDEN)
    torch.testing.assert_close(grouped(x), full(x))
    assert grouped.state_bytes(T) * 2 == full.state_bytes(T)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2},
        {"kv_heads": 1, "window": 9},
        {"kv_heads": 2, "position": "alibi", "window": 5},
        {"heads": 16, "position": "alibi", "rope_base": 1e6},  # slopes that are not exact in float32
        {"rotary_fraction": 0.5, "bias": True, "canon": True, "kv_heads": 2},
        {"qk_norm": True, "temperature": 0.25, "window": 16, "gate": "per head"},
        {"kv_heads": 2, "position": "alibi", "window": 16, "sinks": True, "bias": True, "gate": "elementwise"},
        {"head_dim": 24, "gate": "elementwise", "qk_norm": True},  # together wider than the model
    ],
    ids=str,
)
def test_combined_options_conform(options, monkeypatch):
    # `test_conformance.py` proves the layer on long sequences and in deep models; these are longer than any window.
    monkeypatch.setattr("basecap.testing._initialisation.DEPTHS", (12,))
    report = check_mixer("transformer++", options={"heads": 4, **options}, length=40, longest=0)
    assert report.checks
    report.raise_failures()


@pytest.mark.parametrize(
    ("heads", "exponents"),
    # get_slopes of ofirpress/attention_with_linear_biases, fairseq/models/transformer.py.
    [
        (1, [8.0]),
        (3, [4.0, 8.0, 2.0]),
        (8, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        (12, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_is_the_published_series(heads: int, exponents: list[float]):
    slopes = alibi_slopes(heads, torch.device("cpu"))
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, 2.0 ** -torch.tensor(exponents))


def test_ring_holds_the_window_however_long_the_text():
    mixer = build(window=4)
    cache = mixer.init_cache(2, max_length=10**6)
    assert cache.tensors["k"].shape == (2, 4, HEADS, HIDDEN // HEADS)
    x = draw(2, T, HIDDEN)
    steps = torch.cat([mixer.step(x[:, t : t + 1], cache) for t in range(T)], dim=1)
    torch.testing.assert_close(steps, mixer(x))


@pytest.mark.parametrize("prompt", [0, 10])
@pytest.mark.parametrize("options", [{}, {"window": 15}])
def test_full_cache_is_refused(prompt, options):
    mixer = build(**options)
    cache = mixer.init_cache(1, max_length=10)
    x = draw(1, 11, HIDDEN)
    if prompt:
        mixer.prefill(x[:, :prompt], cache)
    with pytest.raises(ConfigError, match="room for 10 tokens; make it for at least 11"):
        for t in range(prompt, 11):
            mixer.step(x[:, t : t + 1], cache)


def test_prompt_that_does_not_fit_is_refused():
    mixer = build()
    with pytest.raises(ConfigError, match="room for 10 tokens; make it for at least 21"):
        mixer.prefill(draw(1, T, HIDDEN), mixer.init_cache(1, max_length=10))


def test_lower_temperature_lowers_the_entropy():
    x = draw(2, T, HIDDEN)
    mean = [
        entropy(build("transformer++ temperature", temperature=temperature).influence(x).whole()).mean().item()
        for temperature in (4.0, 1.0, 0.25, 1 / 16)
    ]
    assert mean == sorted(mean, reverse=True)


def test_temperature_ignores_the_size_of_queries_and_keys():
    mixer, x = build("transformer++ temperature"), draw(2, T, HIDDEN)
    before = mixer.influence(x).whole()
    with torch.no_grad():
        mixer.project.qkv.weight[: 2 * HIDDEN] *= 7
    torch.testing.assert_close(mixer.influence(x).whole(), before, rtol=1e-4, atol=1e-6)


def test_parameters_of_the_published_sizes():
    for hidden, heads in ((768, 12), (2048, 16)):
        choice = ARCHITECTURES.get("transformer++").layers[0]
        with torch.device("meta"):
            mixer = choice.mixer(choice.configure(hidden, {}), LayerSpec(hidden=hidden))
        assert mixer.project.heads == heads
        assert sum(p.numel() for p in mixer.parameters()) == 4 * hidden**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_fraction": 0.01}, "leaves RoPE none to rotate"),
        ({"qk_gain": True}, "qk_gain is the gain of normalised queries and keys; set qk_norm: true with it"),
        ({"temperature": 0.0}, "temperature"),
        ({"position": "rotary"}, "position"),
        ({"windw": 3}, "did you mean 'window'"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_heads_need_no_channels_to_rotate_without_rope():
    for options in ({"heads": 64}, {"rotary_fraction": 0.01}):
        assert build(**options, position="none")(draw(1, 3, HIDDEN)).shape == (1, 3, HIDDEN)

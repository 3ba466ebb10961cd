"""Published layouts: a folder with tiny random weights gives the logits of the library's own model, in float32."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from basecap.errors import BasecapError, ConfigError, DataError
from basecap.families import FAMILIES, read_model

VOCAB, HIDDEN, LENGTH = 50, 64, 19
SHARED = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "intermediate_size": 96, "attn_implementation": "eager"}


def mamba(**more) -> nn.Module:
    return MambaForCausalLM(MambaConfig(**SHARED, state_size=8, **more))


def mamba2(**more) -> nn.Module:
    options = {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 8}
    return Mamba2ForCausalLM(Mamba2Config(**SHARED, **options, **more))


def pythia(**more) -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHARED, **ATTENTION, **more))


def llama(**more) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    options = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": rope}
    return LlamaForCausalLM(LlamaConfig(**SHARED, **ATTENTION, **options, **more))


def mistral(**more) -> nn.Module:
    options = {"num_key_value_heads": 2, "sliding_window": 7, "head_dim": 24}  # heads wider than the model
    return MistralForCausalLM(MistralConfig(**SHARED, **ATTENTION, **options, **more))


HYBRID = {**SHARED, **ATTENTION, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
HYBRID |= {"linear_value_head_dim": 16}


def qwen3_next(**more) -> nn.Module:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, num_experts=0, **more))


def qwen3_5_text(**more) -> nn.Module:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID, **more))


def qwen3_5(**more) -> nn.Module:
    pictures = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=HYBRID, vision_config=pictures, **more))


def stirred(model: nn.Module) -> nn.Module:
    """Move every weight, so that none is at a neutral value such as 1 for gains."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


ALL = (mamba, mamba2, pythia, llama, mistral, qwen3_next, qwen3_5_text, qwen3_5)
BUILDS = [(build, tied) for build in ALL for tied in (False, True)]


@pytest.mark.parametrize("build, tied", BUILDS, ids=[f"{build.__name__}-{tied}" for build, tied in BUILDS])
@torch.no_grad()
def test_logits_are_those_of_the_library(build, tied: bool, tmp_path: Path):
    theirs = stirred(build(tie_word_embeddings=tied))
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")  # several files and an index
    ours = read_model(tmp_path)
    assert (ours.head is None) == tied
    expected = theirs(tokens(), use_cache=False).logits
    close = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    torch.testing.assert_close(ours.logits(tokens()), expected, **close)
    prompts, (*steps, _) = tokens()[:, :-3], tokens()[:, -3:].split(1, dim=1)
    logits = [ours.prefill(prompts, caches := ours.init_cache(2, LENGTH)), *(ours.step(one, caches) for one in steps)]
    torch.testing.assert_close(torch.stack(logits, dim=1), expected[:, -4:-1], **close)


RWKV = {**SHARED, "model_type": "rwkv7", "hidden_size": 128, "head_dim": 64, "intermediate_size": 160}
RWKV |= {"decay_low_rank_dim": 6, "a_low_rank_dim": 5, "v_low_rank_dim": 4, "gate_low_rank_dim": 7}


def rwkv7_shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes that flash-linear-attention gives the weights of such a model."""
    D, inner = RWKV["hidden_size"], RWKV["intermediate_size"]
    shapes = {"model.embeddings.weight": (VOCAB, D), "lm_head.weight": (VOCAB, D)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i in range(2):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.{name}" for name in ("attn_norm", "ffn_norm", "attn.g_norm")]
        shapes |= {f"{layer}.attn.x_{letter}": (1, 1, D) for letter in "rwkvag"}
        shapes |= {f"{layer}.attn.{letter}_proj.weight": (D, D) for letter in "rkvo"}
        shapes |= {f"{layer}.attn.k_k": (D,), f"{layer}.attn.k_a": (D,), f"{layer}.attn.r_k": (D // 64, 64)}
        ranks = {"w": "decay", "a": "a", "g": "gate"} | ({"v": "v"} if i else {})
        for letter, name in ranks.items():
            low = f"{layer}.attn.{letter}_lora.lora"
            rank = RWKV[f"{name}_low_rank_dim"]
            shapes |= {f"{low}.0.weight": (rank, D), f"{low}.2.weight": (D, rank)}
            shapes |= {} if letter == "g" else {f"{low}.2.bias": (D,)}
        shapes |= {
            f"{layer}.ffn.x_k": (D,),
            f"{layer}.ffn.key.weight": (inner, D),
            f"{layer}.ffn.value.weight": (D, inner),
        }
    return shapes | {f"{norm}.{part}": (D,) for norm in norms for part in ("weight", "bias")}


def rwkv7_logits(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The model of arXiv 2503.14456 in these names, token by token, in float64."""
    w = {name: value.double() for name, value in weights.items()}
    D = RWKV["hidden_size"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def shift(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1)) - x

    x, first = norm(w["model.embeddings.weight"][ids], "model.layers.0.pre_norm"), None
    for i in range(2):
        layer = f"model.layers.{i}"
        mixed, first = rwkv7_attention(norm(x, f"{layer}.attn_norm"), w, f"{layer}.attn", shift, first)
        x = x + mixed
        h = norm(x, f"{layer}.ffn_norm")
        h = (h + shift(h) * w[f"{layer}.ffn.x_k"]) @ w[f"{layer}.ffn.key.weight"].T
        x = x + h.relu().square() @ w[f"{layer}.ffn.value.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def rwkv7_attention(x: Tensor, w: dict[str, Tensor], at: str, shift, first: Tensor | None) -> tuple[Tensor, Tensor]:
    B, T, D = x.shape
    xr, xw, xk, xv, xa, xg = (x + shift(x) * w[f"{at}.x_{letter}"] for letter in "rwkvag")

    def lora(h: Tensor, letter: str, act=lambda inner: inner) -> Tensor:
        low = f"{at}.{letter}_lora.lora"
        return act(h @ w[f"{low}.0.weight"].T) @ w[f"{low}.2.weight"].T + w.get(f"{low}.2.bias", torch.zeros(D))

    r, k, v = (h @ w[f"{at}.{name}_proj.weight"].T for h, name in ((xr, "r"), (xk, "k"), (xv, "v")))
    decay = torch.exp(-math.exp(-0.5) * lora(xw, "w", torch.tanh).sigmoid())
    a, g = lora(xa, "a").sigmoid(), lora(xg, "g", torch.sigmoid)
    if first is None:
        first = v
    else:
        v = v + (first - v) * lora(xv, "v").sigmoid()
    kk = F.normalize((k * w[f"{at}.k_k"]).view(B, T, -1, 64), dim=-1)
    k = k * (1 + (a - 1) * w[f"{at}.k_a"])
    r, decay, k, v, a = (part.view(B, T, -1, 64) for part in (r, decay, k, v, a))
    state, rows = x.new_zeros(B, D // 64, 64, 64), []
    for t in range(T):
        removed = (state @ -kk[:, t, :, :, None]) @ (kk[:, t] * a[:, t])[:, :, None]
        state = state * decay[:, t, :, None] + removed + v[:, t, :, :, None] @ k[:, t, :, None]
        rows.append((state @ r[:, t, :, :, None]).flatten(1))
    o = torch.stack(rows, dim=1).flatten(0, 1)
    o = F.group_norm(o, D // 64, w[f"{at}.g_norm.weight"], w[f"{at}.g_norm.bias"], 64e-5).view(B, T, D)
    own = ((r * k * w[f"{at}.r_k"]).sum(-1, keepdim=True) * v).flatten(2)
    return ((o + own) * g) @ w[f"{at}.o_proj.weight"].T, first


@torch.no_grad()
def test_rwkv7_has_the_logits_of_its_formula_in_the_published_names(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in rwkv7_shapes().items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(RWKV))
    expected = rwkv7_logits(weights, tokens())
    found = read_model(tmp_path).logits(tokens())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def saved(model: nn.Module, folder: Path, **changes) -> Path:
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "basecap"}, "was exported by basecap; `basecap report DIR DIR` joins its study with another."),
        ({"model_type": "lama"}, "has a model of type 'lama', which cannot be imported; did you mean 'llama'?"),
        (
            {"hidden_act": "gelu"},
            "this llama has hidden_act = 'gelu', and basecap has such models with 'silu' only; im",
        ),
        ({"head_dim": 8}, "has a shape that makes [128, 64], and config.json describes [64, 64]; restore the files"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"this llama scales its positions (yarn), and basecap does not;"),
        ({"hidden_size": "x"}, "config.json has hidden_size = 'x'; give a folder where it is a positive whole number."),
        (
            {"rope_parameters": {"rope_theta": "1e4"}},
            "config.json has rope_theta = '1e4'; give a folder where it is a ",
        ),
        ({"rope_parameters": "yarn"}, "config.json has positions 'yarn'; give a folder where they are a section."),
        ({"num_hidden_layers": 10**12}, "lacks weight model.layers.2."),
        ({"vocab_size": 2**30}, "config.json describes 137,439,015,232 parameters, and its weights have 27"),
        ({"num_hidden_layers": 1}, "has an unknown weight model.layers.1.input_layernorm.weight; restore its files,"),
        ({"vocab_size": 51}, "has a shape that makes [50, 64], and config.json describes [51, 64]; restore the files"),
    ],
)
def test_one_sentence_for_a_folder_that_is_not_the_same_architecture(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(BasecapError) as caught:
        read_model(saved(llama(), tmp_path, **changes))
    assert message in str(caught.value)


def test_step_sizes_with_limits_and_odd_heads_are_refused(tmp_path: Path):
    folder = saved(mamba2(), tmp_path, time_step_limit=[0.01, 0.1])
    with pytest.raises(ConfigError, match="this mamba2 limits its step sizes, and basecap does not"):
        read_model(folder)
    folder = saved(mamba2(), tmp_path, num_heads=3)
    with pytest.raises(ConfigError, match="this mamba2 has 3 heads of 32 channels for 128; give a sound config"):
        read_model(folder)


def test_a_hybrid_that_is_another_architecture_is_refused(tmp_path: Path):
    folder = saved(qwen3_next(), tmp_path, num_experts=8)
    with pytest.raises(
        ConfigError, match="this qwen3_next has experts, and basecap has its gated-deltanet and gated at"
    ):
        read_model(folder)
    folder = saved(qwen3_next(), tmp_path, linear_num_value_heads=3)
    with pytest.raises(ConfigError, match="this qwen3_next has 2 key heads of 8 channels and 3 value heads of 16, and"):
        read_model(folder)
    folder = saved(qwen3_5_text(), tmp_path, attn_output_gate=False)
    with pytest.raises(ConfigError, match="this qwen3_5_text has attn_output_gate = False, and basecap has such"):
        read_model(folder)
    folder = saved(qwen3_5(), tmp_path, text_config=None)
    with pytest.raises(ConfigError, match=r"config\.json has text_config = None; give a folder where it is a section"):
        read_model(folder)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"config\.json cannot be read \(No such file or directory\); give the folder"
    ):
        read_model(tmp_path)
    saved(llama(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read \(.*\); restore it"):
        read_model(tmp_path)
    weights.unlink()
    with pytest.raises(
        ConfigError, match=r"has no model\.safetensors; download the weights in that format, as pickled"
    ):
        read_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(DataError, match=r"\.\./other\.safetensors leads out of the folder"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not JSON; restore it"):
        read_model(tmp_path)


def test_every_family_is_tested():
    built = {build().config.model_type for build in ALL}
    assert {*FAMILIES.names()} == built | {"rwkv7"}


def test_a_buffer_of_older_files_is_no_weight(tmp_path: Path):
    saved(pythia(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["gpt_neox.layers.0.attention.masked_bias"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors")
    assert read_model(tmp_path).config.depth == 2

"""RWKV-4 against an independent implementation, its state."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._rwkv import build, draw, fresh, outputs_and_gradients

SHARES = [("share_k", "time_mix_key"), ("share_v", "time_mix_value"), ("share_r", "time_mix_receptance")]
SAME = [
    ("decay", "time_decay"),
    ("bonus", "time_first"),
    ("key.weight", "key.weight"),
    ("value.weight", "value.weight"),
    ("receptance.weight", "receptance.weight"),
    ("output.weight", "output.weight"),
]


def test_parity_with_transformers():
    ours = build("rwkv-4")
    config = RwkvConfig(hidden_size=32, num_hidden_layers=1, context_length=64)
    theirs = RwkvSelfAttention(config).to(torch.float64)
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert {name for name, _ in SHARES + SAME} == own.keys()
    assert {name for _, name in SHARES + SAME} == other.keys()
    with torch.no_grad():
        for name, their_name in SHARES:
            other[their_name].copy_(1 - own[name].expand(1, 1, -1))
        for name, their_name in SAME:
            other[their_name].copy_(own[name])
    x = draw(1, 2, 21, 32)
    names = [name for name, _ in SHARES + SAME]
    mine = outputs_and_gradients(ours, x, [own[name] for name in names])
    their_parameters = [other[name] for _, name in SHARES + SAME]
    reference = outputs_and_gradients(lambda h: theirs(h)[0], x, their_parameters)
    # Theirs is the share of the present token, ours that of the previous one.
    for place in range(2, 2 + len(SHARES)):
        reference[place] = -reference[place].flatten()
    for name, actual, expected in zip(["y", "x", *names], mine, reference, strict=True):
        # The other implementation keeps its keys and its state in float32.
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def whole_model_names(layers: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (ours, theirs) of the parameters that are the same, and of those that are the shares of a token."""
    same = [("embedding.weight", "rwkv.embeddings.weight"), ("head.weight", "head.weight")]
    shares = []
    norms = [("embedding_norm", "rwkv.blocks.0.pre_ln"), ("norm", "rwkv.ln_out")]
    for i in range(layers):
        block, theirs = f"blocks.{i}", f"rwkv.blocks.{i}"
        norms += [(f"{block}.mixer_norm", f"{theirs}.ln1"), (f"{block}.feed_forward_norm", f"{theirs}.ln2")]
        same += [(f"{block}.mixer.{a}", f"{theirs}.attention.{b}") for a, b in SAME]
        shares += [(f"{block}.mixer.{a}", f"{theirs}.attention.{b}") for a, b in SHARES]
        for name in ("key.weight", "value.weight", "receptance.weight"):
            same.append((f"{block}.feed_forward.{name}", f"{theirs}.feed_forward.{name}"))
        for name, their_name in (("share_k", "time_mix_key"), ("share_r", "time_mix_receptance")):
            shares.append((f"{block}.feed_forward.{name}", f"{theirs}.feed_forward.{their_name}"))
    same += [(f"{a}.{part}", f"{b}.{part}") for a, b in norms for part in ("weight", "bias")]
    return same, shares


def test_whole_model_parity_with_transformers():
    ours = LanguageModel(model_config("rwkv-4", hidden=32, vocab=50, layers=2, tied=False)).initialise(0).double()
    config = RwkvConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, intermediate_size=64, context_length=64, use_cache=False
    )
    theirs = RwkvForCausalLM(config).to(torch.float64).train()
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    same, shares = whole_model_names(2)
    assert sorted(name for name, _ in same + shares) == sorted(own)
    assert sorted(name for _, name in same + shares) == sorted(other)
    with torch.no_grad():
        for number, parameter in enumerate(own.values()):
            parameter += 0.2 * draw(number, *parameter.shape)
        for name, their_name in same:
            other[their_name].copy_(own[name])
        for name, their_name in shares:
            other[their_name].copy_(1 - own[name].expand(1, 1, -1))
    tokens = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(0))
    logits, expected = ours.logits(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    weight = draw(98, *logits.shape)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    # Theirs is the share of the present token, ours that of the previous one.
    signs = dict.fromkeys(same, 1) | dict.fromkeys(shares, -1)
    for (name, their_name), sign in signs.items():
        grad = sign * other[their_name].grad.view_as(own[name])
        # The other implementation keeps its keys and its state in float32.
        atol = 1e-5 * grad.abs().max().item()
        torch.testing.assert_close(
            own[name].grad, grad, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_state_is_two_numbers_per_channel():
    module = fresh("rwkv-4").float()
    assert module.state_bytes(10) == module.state_bytes(100_000) == 3 * 32 * 4
    assert module.bfloat16().state_bytes(10) == 2 * 32 * 4 + 32 * 2

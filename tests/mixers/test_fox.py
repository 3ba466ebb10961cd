"""The Forgetting Transformer: the published equations in float64, open gates as attention, decoding state, sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import LayerSpec, initialise
from basecap.mixers.fox import Fox
from basecap.models.config import model_config
from basecap.models.outline import outline
from basecap.ops.attention import attention
from tests.mixers._built import built, draw
from tests.mixers._parity import assert_equals_paper

H = 3


def build(name: str = "fox", hidden: int = 12, **options) -> Fox:
    return built(name, hidden, 0.5, **{"heads": H, **options})


def forgetting(mixer: Fox, x_TD: Tensor) -> Tensor:
    """Section 3 of the paper, token by token; of the Pro form what figure 2 adds."""
    q, k, v = (x_TD @ w.T for w in mixer.qkv.weight.chunk(3))
    f = torch.sigmoid(x_TD @ mixer.forget.weight.T + mixer.forget.bias)
    K, pro = q.shape[1] // H, mixer.shift is not None
    rows: list[list[Tensor]] = []
    for head in range(H):
        channels = slice(head * K, head * K + K)
        keys, values = [], []
        for t in range(len(x_TD)):
            key, value = k[t, channels], v[t, channels]
            if pro:
                alpha = torch.sigmoid(mixer.shift.weight @ x_TD[t])
                before = (k[t - 1, channels], v[t - 1, channels]) if t else (0 * key, 0 * value)
                key = alpha[head] * before[0] + (1 - alpha[head]) * key
                value = alpha[H + head] * before[1] + (1 - alpha[H + head]) * value
                key = mixer.k_gain[head] * key / (key.square().mean() + 1e-5).sqrt()
            keys.append(key)
            values.append(value)
        outputs = []
        for t in range(len(x_TD)):
            query = q[t, channels]
            if pro:
                query = mixer.q_gain[head] * query / (query.square().mean() + 1e-5).sqrt()
            weights = torch.stack(
                [(query @ keys[s] / K**0.5).exp() * f[s + 1 : t + 1, head].prod() for s in range(t + 1)]
            )
            o = weights @ torch.stack(values[: t + 1]) / weights.sum()
            if pro:
                o = mixer.norm_weight[head] * o / (o.square().mean() + 1e-6).sqrt()
                o = o * torch.sigmoid(mixer.gate.weight[channels] @ x_TD[t])
            outputs.append(o)
        rows.append(outputs)
    return torch.stack([torch.cat(heads) for heads in zip(*rows, strict=True)]) @ mixer.out.weight.T


@pytest.mark.parametrize("name", ["fox", "fox pro"])
def test_is_the_published_one(name: str):
    assert_equals_paper(build(name), forgetting, length=20)


def test_gates_of_one_are_attention():
    mixer, x = build(), draw(2, 150, 12)
    with torch.no_grad():
        mixer.forget.weight.zero_()
        mixer.forget.bias.fill_(50.0)
        q, k, v = mixer.qkv(x).unflatten(-1, (3, H, -1)).unbind(2)
        torch.testing.assert_close(mixer(x), mixer.out(attention(q, k, v).flatten(2)))


def test_gates_start_at_one_half():
    mixer = Fox(Fox.Config(heads=2), LayerSpec(hidden=64))
    initialise(mixer, mixer.recipe(), 0)
    x = draw(1, 50, 64).float()
    gates = mixer.forget(x).sigmoid()
    assert 0.45 < gates.mean() < 0.55 and gates.std() < 0.1


def test_decoding_with_rope():
    mixer, x = build("fox pro", position="rope"), draw(1, 9, 12)
    cache = mixer.init_cache(1, 9)
    steps = [mixer.prefill(x[:, :4], cache), *(mixer.step(x[:, t : t + 1], cache) for t in range(4, 9))]
    torch.testing.assert_close(torch.cat(steps, dim=1), mixer(x))
    assert not torch.allclose(mixer(x), build("fox pro")(x))


def test_what_decoding_keeps():
    mixer = build("fox pro").float()
    cache = mixer.init_cache(2, 7)
    assert {name: tuple(x.shape) for name, x in cache.tensors.items()} == {
        "k": (2, 7, H, 4),
        "v": (2, 7, H, 4),
        "log_decay": (2, 7, H),
        "last_k": (2, 12),
        "last_v": (2, 12),
    }
    assert build("fox pro").bfloat16().init_cache(1, 2).tensors["log_decay"].dtype == torch.float32
    x = draw(2, 8, 12).float()
    mixer.prefill(x[:, :7], cache)
    unshifted = F.linear(x[:, 6], mixer.qkv.weight).chunk(3, dim=-1)
    torch.testing.assert_close((cache.tensors["last_k"], cache.tensors["last_v"]), unshifted[1:])
    with pytest.raises(ConfigError, match="room for 7 tokens; make it for at least 8"):
        mixer.step(x[:, 7:], cache)


def test_parameters_of_the_published_sizes():
    attention_alone = outline(model_config("transformer++", hidden=768, vocab=32_000, tied=False)).parameters_count()
    counts = [outline(model_config(name, hidden=768, vocab=32_000)).parameters_count() for name in ("fox", "fox pro")]
    gates = 768 * 12 + 12
    # Pro: shares of two shifts, two gains, a norm; its gate has as many as SwiGLU lost.
    assert [count - attention_alone for count in counts] == [12 * gates, 12 * (gates + 2 * 768 * 12 + 3 * 768)]


def test_bad_options_are_named():
    with pytest.raises(
        ConfigError, match=r"^RoPE needs an even head size, not 3; choose other heads than 3, or another width\.$"
    ):
        build(hidden=9, position="rope")
    with pytest.raises(ConfigError, match="did you mean 'heads'"):
        build(head=2)

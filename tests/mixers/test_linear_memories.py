"""GLA, HGRN-2 and RetNet: their recurrences token by token, the library's own formulas, published sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.mixers import LayerSpec, initialise
from basecap.mixers._linear_memory import LinearMemory, linear_memory
from basecap.mixers.gla import GatedLinearAttention
from basecap.mixers.hgrn_2 import HGRN2
from basecap.mixers.retnet import Retention
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.fla_naive import naive
from tests.mixers._built import draw, moved


def build(cls: type[LinearMemory], index: int = 0) -> LinearMemory:
    return moved(cls(cls.Config(heads=2), LayerSpec(hidden=16, index=index, depth=3)), 0.3)


def read(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """S_t = decay_t S_{t-1} + k_t v_t^T, o_t = q_t S_t, with q, k, v [B, T, H, K] and decay [B, T, H, K]."""
    state, outputs = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=1)


def normed(o: Tensor, gain: Tensor) -> Tensor:
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * gain


def heads(*parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (2, -1)) for part in parts]


def test_gla_is_its_recurrence():
    mixer, x = build(GatedLinearAttention), draw(2, 40, 16, seed=9)
    q, k, v = mixer.qkv(x).split([8, 8, 16], dim=-1)
    decay = torch.sigmoid(mixer.decay_up(mixer.decay_down(x))) ** (1 / 16)
    q, k, v, decay = heads(q, k, v, decay)
    o = normed(read(q / 2, k, v, decay), mixer.norm_weight).flatten(2)
    torch.testing.assert_close(mixer(x), mixer.out(o * F.silu(mixer.gate(x))), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hgrn_2_is_its_recurrence_and_its_bounds_start_as_the_official_ones(index: int):
    started = HGRN2(HGRN2.Config(heads=2), LayerSpec(hidden=16, index=index, depth=3))
    initialise(started, started.recipe(), 0)
    official = torch.zeros(3, 16).softmax(0).cumsum(0)  # fla's bounds of all layers; the first layer's is taken off
    found = torch.zeros(16) if started.bound is None else started.bound.sigmoid()
    torch.testing.assert_close(found, official[index] - official[0])
    mixer, x = build(HGRN2, index), draw(2, 40, 16, seed=9)
    bound = 0.0 if mixer.bound is None else mixer.bound.sigmoid()
    q, f, v = mixer.qfv(x).chunk(3, dim=-1)
    f = bound + (1 - bound) * torch.sigmoid(f)
    q, f, v = heads(F.silu(q), f, v)
    o = normed(read(q / 8**0.5, 1 - f, v, f).flatten(2), mixer.norm_weight)
    torch.testing.assert_close(mixer(x), mixer.out(o), rtol=1e-10, atol=1e-10)


def test_retention_is_the_librarys():
    mixer, x = build(Retention).float(), draw(2, 40, 16, seed=9).float()
    q, k, v, log_decay = mixer.inputs(x, 0, None)
    retention = naive("retention/naive").naive_retention
    expected = retention(q.transpose(1, 2) * 8**0.5, k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(linear_memory(q, k, v, log_decay, None, None)[0], expected, rtol=1e-4, atol=1e-4)
    gated = normed(expected, mixer.norm_weight).flatten(2) * F.silu(mixer.gate(x))
    torch.testing.assert_close(mixer(x), mixer.out(gated), rtol=1e-4, atol=1e-4)
    rotated = mixer.inputs(x, 7, None)[0]  # positions count from the start given
    assert torch.equal(rotated[:, :5], mixer.inputs(F.pad(x, (0, 0, 7, 0)), 0, None)[0][:, 7:12])


def test_decays_by_channel_follow_the_recurrence_of_fla():
    recur = naive("gla/naive").naive_recurrent_gla
    q, k, v, f = (draw(2, 40, 3, 8, seed=seed).float() for seed in range(4))
    state = draw(2, 3, 8, 8, seed=5).float()
    found = linear_memory(q * 8**-0.5, k, v, -4 * f.abs(), state, None)
    for ours, theirs in zip(found, recur(q, k, v, -4 * f.abs(), state, True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "matrices"), [("gla", 4), ("hgrn-2", 4), ("retnet", 8)])
def test_published_sizes(name: str, matrices: int):
    with torch.device("meta"):
        model = LanguageModel(model_config(name, hidden=768, vocab=32_000))
    mixer = model.blocks[1].mixer
    large = sum(p.numel() for p in mixer.parameters() if p.dim() == 2 and min(p.shape) > 16)
    assert large == matrices * 768**2
    assert model.config.depth == 12 and not model.config.tied

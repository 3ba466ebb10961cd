"""DeltaNet: parity with the paper's formula written out, published sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.mixers import LayerSpec, initialise
from basecap.mixers.deltanet import DeltaNet
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._parity import assert_equals_paper


def by_the_paper(mixer: DeltaNet, x_TD: Tensor) -> Tensor:
    """Return [T, D] by arXiv 2406.06484, eq. 2 and section 3.5, one head and one token at a time, states [V, K]."""
    memory = mixer.memory
    H, K = memory.heads, memory.key_dim
    projected = x_TD @ memory.qkv.weight.T
    past = F.pad(projected, (0, 0, 3, 0))
    convolved = F.silu(sum(past[j : j + len(x_TD)] * memory.conv.weight[:, j] for j in range(4)))
    q, k, v = convolved.view(-1, 3, H, K).unbind(1)
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    beta = torch.sigmoid(x_TD @ memory.beta.weight.T)
    heads = []
    for h in range(H):
        S = torch.zeros(K, K, dtype=x_TD.dtype)
        rows = []
        for t in range(len(x_TD)):
            erase = torch.eye(K, dtype=x_TD.dtype) - beta[t, h] * torch.outer(k[t, h], k[t, h])
            S = S @ erase + beta[t, h] * torch.outer(v[t, h], k[t, h])
            rows.append(S @ q[t, h] / K**0.5)
        o = torch.stack(rows)
        heads.append(o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm_weight)
    return torch.cat(heads, dim=-1) @ mixer.out.weight.T


def test_equals_the_paper_in_outputs_and_gradients():
    mixer = DeltaNet(DeltaNet.Config(heads=2), LayerSpec(hidden=12))
    initialise(mixer, mixer.recipe(), 0)
    mixer.double()
    assert_equals_paper(mixer, by_the_paper)


def test_published_size():
    with torch.device("meta"):
        model = LanguageModel(model_config("deltanet", hidden=768, vocab=32_000, tied=True))
    memory = model.blocks[0].mixer.memory
    assert (memory.heads, memory.key_dim, memory.value_dim) == (8, 96, 96)
    assert model.config.depth == 12


def test_state_is_constant_in_length():
    mixer = DeltaNet(DeltaNet.Config(heads=2), LayerSpec(hidden=12))
    assert mixer.state_bytes(10) == mixer.state_bytes(100_000) == 4 * (2 * 6 * 6 + 3 * 36)

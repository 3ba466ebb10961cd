"""Based: parity with the paper's formulas written out, the published pattern, decoding of the hybrid."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise
from basecap.mixers.attention import Attention
from basecap.mixers.based import BasedConv, BasedLinear
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from tests.mixers._parity import assert_equals_paper


def linear_by_the_paper(mixer: BasedLinear, x_TD: Tensor) -> Tensor:
    """Return [T, D] by arXiv 2402.18668, eq. 2 with the feature map of section 4.1, as a recurrence per head."""
    H, K, V = mixer.heads, mixer.config.feature_dim, mixer.head_dim
    q, k, v = (x_TD @ mixer.qkv.weight.T).split([H * K, H * K, H * V], dim=-1)

    def expand(z: Tensor) -> Tensor:
        products = torch.outer(z, z).flatten() / (2 * K) ** 0.5
        return torch.cat([torch.ones(1, dtype=z.dtype), z / K**0.25, products])

    heads = []
    for h in range(H):
        numerator = torch.zeros(1 + K + K * K, V, dtype=x_TD.dtype)
        denominator = torch.zeros(1 + K + K * K, dtype=x_TD.dtype)
        rows = []
        for t in range(len(x_TD)):
            query, key = (expand(z[t, h * K : (h + 1) * K]) for z in (q, k))
            numerator = numerator + torch.outer(key, v[t, h * V : (h + 1) * V])
            denominator = denominator + key
            rows.append(query @ numerator / (query @ denominator))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ mixer.out.weight.T


def conv_by_the_paper(mixer: BasedConv, x_TD: Tensor) -> Tensor:
    """Return [T, D] of the gated convolution, one token at a time."""
    u, gate = (x_TD @ mixer.in_proj.weight.T + mixer.in_proj.bias).chunk(2, dim=-1)
    rows = []
    for t in range(len(x_TD)):
        taps = [mixer.conv.weight[:, 2 - j] * u[t - j] for j in range(3) if t - j >= 0]
        rows.append(F.silu(sum(taps)) * gate[t])
    return torch.stack(rows) @ mixer.out.weight.T + mixer.out.bias


def build(name: str, hidden: int, **options: int) -> Mixer:
    choice = ARCHITECTURES.get(name).layers[0]
    mixer = choice.mixer(choice.configure(hidden, options), LayerSpec(hidden=hidden))
    initialise(mixer, mixer.recipe(), 0)
    return mixer.double()


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_equals_the_paper_in_outputs_and_gradients(kind: str):
    if kind == "linear":
        mixer, paper = build("based linear", 12, heads=2, feature_dim=4), linear_by_the_paper
    else:
        mixer, paper = build("based conv", 12), conv_by_the_paper
    assert_equals_paper(mixer, paper)


def test_published_pattern():
    with torch.device("meta"):
        model = LanguageModel(model_config("based", hidden=768, vocab=32_000))
    mixers = [block.mixer for block in model.blocks]
    assert len(mixers) == 15
    assert [i for i, mixer in enumerate(mixers) if isinstance(mixer, BasedLinear)] == [1, 6, 11]
    assert [i for i, mixer in enumerate(mixers) if isinstance(mixer, Attention)] == [2, 7, 12]
    assert sum(isinstance(mixer, BasedConv) for mixer in mixers) == 9
    assert mixers[2].config.window == 65
    assert mixers[1].config.heads == mixers[2].config.heads == 12


def test_the_hybrid_decodes_as_it_prefills():
    model = LanguageModel(model_config("based", hidden=32, vocab=50, layers=4)).initialise(0).double()
    tokens = torch.randint(50, (2, 160), generator=torch.Generator().manual_seed(0))
    logits = model.logits(tokens)
    caches = model.init_cache(2, 160)
    with torch.no_grad():
        found = [model.prefill(tokens[:, :100], caches)]
        found += [model.step(tokens[:, t : t + 1], caches) for t in range(100, 160)]
    torch.testing.assert_close(torch.stack(found, dim=1), logits[:, 99:])


def test_an_odd_expansion_is_refused():
    with pytest.raises(ConfigError, match="expand"):
        build("based conv", 64, expand=3)

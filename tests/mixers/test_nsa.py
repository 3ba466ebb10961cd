"""Native Sparse Attention: the published equations in float64, parity with fla's naive code, decoding state, sizes."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import rotary
from basecap.mixers.nsa import NSA, choose, cut, means, read_means
from basecap.models.config import model_config
from basecap.models.outline import outline
from basecap.ops.attention import attention
from basecap.ops.selected_attention import selected_attention
from tests.fla_naive import naive
from tests.mixers._built import built, draw
from tests.mixers._parity import assert_compiled_is_as_accurate, assert_equals_paper

#: Query heads, key heads, tokens per block, blocks read, window.
H, G, BLOCK, TOP, WINDOW = 6, 3, 4, 4, 5


def build(hidden: int = 12, **options) -> NSA:
    given = {"heads": H, "kv_heads": G, "block": BLOCK, "top": TOP, "window": WINDOW, **options}
    return built("nsa", hidden, 0.5, **given)


def sparse(mixer: NSA, x_TD: Tensor) -> Tensor:
    """Section 3 of the paper, token by token, with means as compression."""
    K, T = 2, len(x_TD)
    q, k, v = (x_TD @ mixer.project.qkv.weight.T).split([H * K, G * K, G * K], dim=-1)
    q, k = (rotary(x.unflatten(-1, (-1, K)), torch.arange(T), 10_000.0) for x in (q, k))
    v, gates = v.unflatten(-1, (G, K)), torch.sigmoid(x_TD @ mixer.branches.weight.T).unflatten(-1, (H, 3))
    rows = []
    for t in range(T):
        own, outputs = t // BLOCK, []
        whole = [list(range(m * BLOCK, (m + 1) * BLOCK)) for m in range((t + 1) // BLOCK)]
        for group in range(G):
            heads, importance = range(group * H // G, (group + 1) * H // G), torch.zeros(own + 1)
            compressed = {head: torch.zeros(K, dtype=x_TD.dtype) for head in heads}
            for head in heads:
                if whole:
                    scores = torch.stack([q[t, head] @ k[block, group].mean(0) for block in whole]) / K**0.5
                    p = scores.exp() / scores.exp().sum()
                    importance[: len(whole)] += p.detach()
                    compressed[head] = p @ torch.stack([v[block, group].mean(0) for block in whole])
            always = {0, own, max(own - 1, 0)}
            rest = sorted(set(range(own)) - always, key=lambda m, w=importance: -w[m])[: TOP - len(always)]
            chosen = [s for s in range(t + 1) if s // BLOCK in {*always, *rest}]
            for head in heads:
                o = gates[t, head, 0] * compressed[head]
                for branch, read in ((1, chosen), (2, range(max(0, t + 1 - WINDOW), t + 1))):
                    p = (k[list(read), group] @ q[t, head] / K**0.5).exp()
                    o = o + gates[t, head, branch] * (p @ v[list(read), group]) / p.sum()
                outputs.append(o)
        rows.append(torch.cat(outputs))
    return torch.stack(rows) @ mixer.out.weight.T


def test_is_the_published_one():
    assert_equals_paper(build(), sparse, length=30)


@pytest.fixture
def reference(monkeypatch) -> ModuleType:
    """Load fla's code without the kernels that it uses for packed sequences."""
    unused = {"fla.ops.utils": "prepare_chunk_offsets", "fla.ops.utils.pooling": "mean_pooling"}
    for name, function in unused.items():
        module = ModuleType(name)
        setattr(module, function, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    vars(sys.modules["flash_attn"]).update(flash_attn_func=None, flash_attn_varlen_func=None)
    return naive("nsa/naive")


def test_chooses_and_mixes_as_fla_does(reference):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 38, heads, 8, generator=generator) for heads in (H, G, G))
    blocks = cut(q.flatten(2), None, BLOCK)
    mean_k, mean_v = (means(x, blocks, BLOCK) for x in (k, v))
    weights = read_means(q, mean_k, blocks.reads_BTM)
    theirs, _ = reference.naive_nsa_compression(q, mean_k, mean_v, BLOCK, 8**-0.5)
    torch.testing.assert_close(NSA._mix(weights, mean_v), theirs)
    best, exists = choose(torch.nn.functional.pad(weights.sum(3), (0, 1)), blocks.own_BT, TOP)
    # fla scores the last block too, though no query reads it whole.
    padded = torch.cat([mean_k, mean_k[:, :1]], dim=1)
    expected = reference.naive_nsa_topk(q, padded, TOP, BLOCK, 8**-0.5)
    assert torch.equal(torch.where(exists, best, -1).sort(-1).values, expected.sort(-1).values)
    chosen = torch.zeros(2, 38, G, 10, dtype=torch.bool).scatter(-1, best, exists)
    torch.testing.assert_close(
        selected_attention(q, k, v, chosen, blocks.own_BT), reference.naive_nsa_selection(q, k, v, expected, BLOCK)
    )


def test_the_first_block_the_own_and_the_one_before_are_read_whatever_the_others_weigh():
    weights, own = torch.zeros(1, 1, 1, 10), torch.tensor([[9]])
    weights[..., 4] = 4.0  # the sum of four heads that share a choice
    best, exists = choose(weights, own, 3)
    assert best.sort().values.tolist() == [[[[0, 8, 9]]]] and exists.all()


def test_the_selected_branch_alone_with_all_blocks_is_attention():
    mixer, x = build(top=10), draw(2, 40, 12)
    with torch.no_grad():
        mixer.branches.weight.zero_()
        mixer._gates = lambda x: torch.tensor([0.0, 1.0, 0.0]).expand(*x.shape[:2], H, 3)
        q, k, v = mixer.project(x)
        torch.testing.assert_close(mixer(x), mixer.out(attention(q, k, v).flatten(2)))


def test_what_decoding_keeps():
    mixer, x = build().float(), draw(2, 11, 12).float()
    cache = mixer.init_cache(2, 11)
    kept = {"k": (2, 11, G, 2), "v": (2, 11, G, 2), "mean_k": (2, 3, G, 2), "mean_v": (2, 3, G, 2)}
    assert {name: tuple(tensor.shape) for name, tensor in cache.tensors.items()} == kept
    mixer.prefill(x[:, :6], cache)
    for t in (6, 7):
        mixer.step(x[:, t : t + 1], cache)
    _, k, _ = mixer.project(x)
    torch.testing.assert_close(cache.tensors["mean_k"][:, :2], k[:, :8].unflatten(1, (2, 4)).mean(2))
    assert build().bfloat16().init_cache(1, 9).tensors["mean_v"].dtype == torch.float32


def test_parameters_are_those_of_attention_and_the_gates():
    attention_alone = outline(model_config("transformer++", hidden=768, vocab=32_000, tied=False)).parameters_count()
    ours = outline(model_config("nsa", hidden=768, vocab=32_000)).parameters_count()
    assert ours - attention_alone == 12 * 768 * 3 * 12


def test_means_are_as_wide_under_autocast_with_documents_as_without():
    x = draw(2, 32, 1, 16).bfloat16()
    segments = torch.tensor([[0] * 9 + [1] * 23, [0] * 32])
    with torch.autocast("cpu", torch.bfloat16):
        found = means(x, cut(x[:, :, 0], segments, 4), 4)
    expected = means(x.float(), cut(x[:, :, 0], segments, 4), 4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_more_blocks_than_there_are_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^top is 65, more than the blocks of 32 in a sequence of 2048 tokens \(64\); choose a smaller one\.$",
    ):
        build(block=32, top=65)
    with pytest.raises(ConfigError, match="cannot be 24: it should be 4, 8, 16, 32, 64 or 128"):
        build(block=24)
    with pytest.raises(ConfigError, match="option 'top' of mixer NSA cannot be 2"):
        build(top=2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, as is the next
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_on_a_gpu():
    """Every query reads all blocks of its past, so that rounding changes no choice."""
    assert_compiled_is_as_accurate(built("nsa", 128, 0.05, heads=2, block=32, top=8, window=128), length=256)

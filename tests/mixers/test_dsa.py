"""DeepSeek Sparse Attention: the published equations in float64, parity with transformers' indexer and fla's code."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.mixers import rotary
from basecap.mixers.dsa import DSA, numbers
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.ops.attention import attention
from basecap.ops.selected_attention import selected_attention
from basecap.ops.token_choice import best, choose_by_index, index_scores, mass
from tests.fla_naive import naive
from tests.mixers._built import built, draw
from tests.mixers._parity import assert_equals_paper

#: Query heads, key heads, tokens read; heads of the indexer and their size.
H, G, TOP, HEADS, SIZE = 3, 1, 5, 2, 8


def build(name: str = "dsa", hidden: int = 12, **options) -> DSA:
    indexed = name == "dsa" and options.get("selector") != "mass"
    index = {"index_heads": HEADS, "index_dim": SIZE} if indexed else {}
    return built(name, hidden, 0.5, **{"heads": H, "kv_heads": G, "top": TOP, **index, **options})


class WithLoss(nn.Module):
    """A mixer whose outputs have its own loss added."""

    def __init__(self, mixer: DSA):
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        losses: dict[str, Tensor] = {}
        return self.mixer(x, losses=losses) + losses.get("indexer", torch.zeros(()))


def paper(model: WithLoss, x_TD: Tensor) -> Tensor:
    """Equations 1 to 4, token by token."""
    mixer, T, K = model.mixer, len(x_TD), 4
    turn = partial(rotary, positions=torch.arange(T), base=10_000.0)
    q, k, v = (x_TD @ mixer.project.qkv.weight.T).split([H * K, K, K], dim=-1)
    q, k = turn(q.unflatten(-1, (H, K))), turn(k[:, None])[:, 0]
    indexed = mixer.config.selector == "indexer"
    if indexed:
        detached = x_TD.detach()
        iq = turn((detached @ mixer.index_q.weight.T).unflatten(-1, (HEADS, SIZE)), dims=SIZE // 2)
        ik = detached @ mixer.index_k.weight.T
        ik = (ik - ik.mean(-1, keepdim=True)) / (ik.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        ik = turn((ik * mixer.index_norm.weight + mixer.index_norm.bias)[:, None], dims=SIZE // 2)[:, 0]
        w = detached @ mixer.index_weights.weight.T / HEADS**0.5
    rows, loss = [], torch.zeros((), dtype=x_TD.dtype)
    for t in range(T):
        p = torch.stack([(k[: t + 1] @ q[t, h] / K**0.5).softmax(0) for h in range(H)]).sum(0).detach()
        scores = p
        if indexed:
            scores = torch.stack([(w[t] * (iq[t] @ ik[s] / SIZE**0.5).relu()).sum() for s in range(t + 1)])
        # Of tokens that score the same, the latest.
        read = sorted(range(t + 1), key=lambda s, scores=scores: (-scores[s].item(), -s))[:TOP]
        if indexed:
            seen = range(t + 1) if mixer.config.target == "visible" else read
            target = torch.stack([(k[seen] @ q[t, h] / K**0.5).softmax(0) for h in range(H)]).sum(0).detach() / H
            loss = loss + (target * (target.log() - scores[seen].log_softmax(0))).sum() / T
        rows.append(torch.cat([(k[read] @ q[t, h] / K**0.5).softmax(0) @ v[read] for h in range(H)]))
    return torch.stack(rows) @ mixer.out.weight.T + loss


@pytest.mark.parametrize("options", [{}, {"target": "chosen"}, {"selector": "mass"}], ids=["dsa", "chosen", "mass"])
def test_is_the_published_one(options):
    assert_equals_paper(WithLoss(build(**options)), paper, length=20)


def test_the_indexer_is_that_of_transformers():
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    mixer, x = build(hidden=32, heads=2, index_heads=8), draw(2, 40, 32)
    sizes = SimpleNamespace(
        hidden_size=32,
        q_lora_rank=32,
        index_n_heads=8,
        index_head_dim=SIZE,
        qk_rope_head_dim=SIZE // 2,
        index_topk=TOP,
    )
    theirs = deepseek.DeepseekV32Indexer(sizes, 0).double()
    for name, ours in (
        ("wq_b", "index_q"),
        ("wk", "index_k"),
        ("k_norm", "index_norm"),
        ("weights_proj", "index_weights"),
    ):
        getattr(theirs, name).load_state_dict(getattr(mixer, ours).state_dict())
    angles = torch.arange(40)[:, None] * 10_000.0 ** (-torch.arange(2) / 2)
    angles = torch.cat([angles, angles], dim=-1).double().expand(2, -1, -1)
    causal = torch.ones(2, 40, 40).tril().bool()
    found = theirs(x, x, (angles.cos(), angles.sin()), causal, None)
    q, k, _ = mixer.project(x)
    chosen = mixer._chosen(mixer._index(x), q, k, None)[:, :, 0]
    differ = chosen != torch.zeros_like(chosen).scatter(-1, found.long(), True) & causal
    # Where all heads' ReLU give 0, theirs takes any.
    assert (index_scores(*mixer._index(x))[differ] == 0).all() and differ.float().mean() < 0.01


def test_chooses_and_reads_as_fla_does():
    reference = naive("dsa/naive")
    q, k, v, index_q = (draw(2, 30, heads, 8, seed=heads).float() for heads in (4, 2, 2, 3))
    index_k, weights = draw(2, 30, 8, seed=5).float(), draw(2, 30, 3, seed=6).float()
    causal = torch.ones(2, 30, 30).tril().bool()
    ours = choose_by_index(index_q, index_k, weights, TOP)
    indices = reference.naive_dsa_indexer(index_q, index_k, weights, TOP, activation="relu")
    theirs = torch.zeros(2, 30, 31, dtype=torch.bool).scatter(-1, indices.where(indices >= 0, 30), True)[..., :30]
    differ = (ours != theirs) & causal
    # Where scores are equal, as those that ReLU makes 0, fla takes any.
    assert (index_scores(index_q, index_k, weights)[differ] == 0).all()
    expected = reference.naive_dsa(q, k, v, None, None, indices=torch.where(ours, torch.arange(30), -1))
    torch.testing.assert_close(selected_attention(q, k, v, ours[:, :, None], numbers(q)), expected)


@pytest.mark.parametrize("name", ["dsa", "dsa by mass"])
def test_all_tokens_are_attention(name):
    mixer, x = build(name, top=40), draw(2, 40, 12)
    q, k, v = mixer.project(x)
    torch.testing.assert_close(mixer(x), mixer.out(attention(q, k, v).flatten(2)))
    assert not torch.allclose(build(name)(x), mixer(x))


def test_neither_loss_teaches_the_other():
    mixer, x = build(), draw(2, 20, 12).requires_grad_()
    losses: dict[str, Tensor] = {}
    y = mixer(x, losses=losses)
    names, wanted = zip(*mixer.named_parameters(), strict=True)

    def reached(loss: Tensor) -> set[str]:
        found = torch.autograd.grad(loss, [x, *wanted], allow_unused=True)
        return {name for name, grad in zip(("x", *names), found, strict=True) if grad is not None}

    indexer = {name for name in names if name.startswith("index_")}
    assert reached(losses["indexer"]) == indexer and reached(y.sum()) == {"x", *names} - indexer
    assert mixer.auxiliary == {"indexer": 1.0} and build("dsa by mass").auxiliary == {}
    with torch.no_grad():
        assert torch.equal(mixer(x), y)


def test_the_indexer_learns_the_mass():
    mixer, x = build(hidden=32, heads=2, index_heads=4).float(), draw(4, 32, 32).float()
    q, k, _ = mixer.project(x)
    heavy = best(mass(q, k, torch.ones(1, 32, 32).tril().bool()), torch.ones(4, 32, 32).tril().bool(), TOP)
    optimiser = torch.optim.AdamW([p for name, p in mixer.named_parameters() if name.startswith("index_")], lr=0.02)
    found = []
    for _ in range(60):
        losses: dict[str, Tensor] = {}
        mixer(x, losses=losses)
        chosen = mixer._chosen(mixer._index(x), q, k, None)[:, :, 0]
        found.append((losses["indexer"].item(), (chosen & heavy).sum().item() / heavy.sum().item()))
        optimiser.zero_grad()
        losses["indexer"].backward()
        optimiser.step()
    assert found[-1][0] < 0.5 * found[0][0] and found[-1][1] > found[0][1] + 0.2


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_its_loss_counts_once(how, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    pattern = (LayerConfig(use="dsa", mixer={"heads": 2, "top": 4, "index_heads": 2, "index_dim": 8}),)
    config, found = model_config("dsa", hidden=32, vocab=31, layers=1, max_length=32, pattern=pattern), []
    tokens = torch.arange(2 * 20).view(2, 20) % 31
    for changed in (False, True):
        model = LanguageModel(config, checkpointing=changed and how == "recomputed").initialise(0)
        if changed and how == "compiled":
            model.compile_training()
        loss, weighted, (indexer,) = model(tokens, tokens, auxiliary=True)
        (loss + weighted).backward()
        found.append([loss, weighted, indexer, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert 0 < found[0][2] < 5 and torch.equal(loss, model(tokens, tokens))


def test_what_decoding_keeps():
    cache = build().init_cache(2, 7)
    kept = {"k": (2, 7, G, 4), "v": (2, 7, G, 4), "index_k": (2, 7, SIZE)}
    assert {name: tuple(tensor.shape) for name, tensor in cache.tensors.items()} == kept
    assert build("dsa by mass").init_cache(2, 7).tensors.keys() == {"k", "v"}


def test_bad_options_are_named():
    with pytest.raises(
        ConfigError,
        match=r"^top is 2049, more than the tokens in a sequence of 2048 tokens \(2048\); choose a smaller one\.$",
    ):
        build(top=2049)
    with pytest.raises(ConfigError, match="option 'index_dim' of mixer DSA cannot be 6"):
        build(index_dim=6)
    with pytest.raises(ConfigError, match="option 'index_weight' of mixer DSA cannot be 0"):
        build(index_weight=0.0)
    for name, value in {"index_heads": 3, "index_dim": 8, "index_weight": 0.5, "target": "chosen"}.items():
        with pytest.raises(ConfigError, match=f"^{name} is an option of the indexer, and with selector: mass there is"):
            built("dsa by mass", 12, 0.5, **{name: value})

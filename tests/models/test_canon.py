"""Canon layers: the published block in float64, documents, decoding, sizes, and places that a model does not have."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import rotary
from basecap.models.config import LayerConfig, ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.plan.runs import model_of
from basecap.study.architectures import ArchitectureEntry
from basecap.study.config import load_study

VOCAB, LENGTH = 50, 40
SMALL = {"top1-chunk-exact canon": {"chunk": 16}}


def build(use: str, canon: str | None = None, **changes) -> LanguageModel:
    """Return a small model in float64, every parameter off its start."""
    pattern = (LayerConfig(use=use, mixer=SMALL.get(use, {})),)
    config = model_config(use, hidden=32, vocab=VOCAB, layers=2, max_length=LENGTH, pattern=pattern, **changes)
    model = LanguageModel(config.model_copy(update={"canon": canon})).initialise(0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def convolved(x_TD: Tensor, taps_DW: Tensor) -> Tensor:
    """The layer, token by token: the last tap belongs to the token itself."""
    rows = []
    for t in range(len(x_TD)):
        row = x_TD[t]
        for age in range(min(4, t + 1)):
            row = row + taps_DW[:, 3 - age] * x_TD[t - age]
        rows.append(row)
    return torch.stack(rows)


def block(model: LanguageModel, x_TD: Tensor) -> Tensor:
    """A block of transformer++ with Canon layers at all places, as the paper's figure 1 has it."""
    own = model.blocks[0]
    heads = own.mixer.project
    h = convolved(own.mixer_norm(x_TD), own.canon_a.conv.weight)
    h = convolved(heads.qkv(h), heads.canon.conv.weight)
    q, k, v = h.unflatten(-1, (3, heads.heads, heads.dim)).unbind(1)
    q, k = (rotary(y[None], torch.arange(len(x_TD)), 10_000.0)[0] for y in (q, k))
    scores = torch.einsum("thk,shk->hts", q, k) / heads.dim**0.5
    weights = scores.masked_fill(torch.ones(len(x_TD), len(x_TD)).triu(1).bool(), -torch.inf).softmax(-1)
    x_TD = x_TD + own.mixer.out(torch.einsum("hts,shv->thv", weights, v).flatten(1))
    h = convolved(own.feed_forward_norm(x_TD), own.canon_c.conv.weight)
    feed = own.feed_forward
    gate, up = convolved(torch.cat([feed.gate(h), feed.up(h)], dim=-1), feed.canon.conv.weight).chunk(2, dim=-1)
    return x_TD + feed.down(F.gelu(gate) * up)


def test_a_block_with_all_four_is_the_published_one():
    model = build("transformer++ canon")
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    total, added, _ = model.blocks[0](x, None, None, {})
    ours, theirs = (total + added)[0], block(model, x[0])
    torch.testing.assert_close(ours, theirs)
    wanted = [x, *model.blocks[0].parameters()]
    for own, other in zip(*(torch.autograd.grad(y.sin().sum(), wanted) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other)


ROWS = [
    ("transformer++ canon", None, {}),
    ("transformer++ canon-a", None, {}),
    ("top1-chunk-exact canon", None, {}),
    ("mamba-2 canon", None, {}),
    ("gated-deltanet canon", None, {}),
    ("rwkv-7", "acd", {}),
    ("rwkv-4", "d", {}),
    ("pythia", "abcd", {}),
]


@pytest.mark.parametrize(("use", "canon", "changes"), ROWS, ids=[use for use, _, _ in ROWS])
@torch.no_grad()
def test_decoding_and_documents(use: str, canon: str | None, changes: dict):
    model, text = build(use, canon, **changes), tokens()
    logits, caches = model.logits(text), model.init_cache(2, LENGTH)
    found = [model.prefill(text[:, :20], caches)]
    found += [model.step(text[:, t : t + 1], caches) for t in range(20, LENGTH)]
    torch.testing.assert_close(torch.stack(found, dim=1), logits[:, 19:])
    caches = model.init_cache(1, LENGTH)
    assert sum(cache.nbytes for cache in caches) == model.state_bytes(LENGTH)
    steps = [model.prefill(text[:1, :2], caches), *(model.step(text[:1, t : t + 1], caches) for t in range(2, 8))]
    torch.testing.assert_close(torch.stack(steps, dim=1), logits[:1, 1:8])
    packed = model.logits(text, (torch.arange(LENGTH) >= torch.tensor([[17], [2]])).long())
    apart = [model.logits(text[:1, 17:]), model.logits(text[1:, 2:])]
    torch.testing.assert_close(packed[:1, 17:], apart[0])
    torch.testing.assert_close(packed[1:, 2:], apart[1])
    torch.testing.assert_close(packed[:1, :17], logits[:1, :17])
    assert not torch.allclose(logits[:1, 17:], apart[0])


@torch.no_grad()
def test_prompts_of_different_lengths():
    model, text = build("transformer++ canon"), tokens()
    caches = model.init_cache(2, LENGTH)
    found = [model.prefill_each([text[0, :5], text[1, :9]], caches)]
    found += [model.step(torch.stack([text[0, 5 + t : 6 + t], text[1, 9 + t : 10 + t]]), caches) for t in range(6)]
    logits = model.logits(text)
    torch.testing.assert_close(torch.stack(found, dim=1), torch.stack([logits[0, 4:11], logits[1, 8:15]]))


@torch.no_grad()
def test_taps_of_zero_are_no_layer():
    model, plain = build("transformer++ canon"), build("transformer++")
    for name, parameter in model.named_parameters():
        parameter.zero_() if "canon" in name else parameter.copy_(plain.get_parameter(name))
    torch.testing.assert_close(model.logits(tokens()), plain.logits(tokens()))


def test_parameters_of_the_published_size():
    counts = {
        use: outline(model_config(use, hidden=768, vocab=32_000)).parameters_count()
        for use in ("transformer++", "transformer++ canon-a", "transformer++ canon", "mamba-2", "mamba-2 canon")
    }
    assert counts["transformer++ canon-a"] - counts["transformer++"] == 12 * 3_072
    assert counts["transformer++ canon"] - counts["transformer++"] == 12 * (3_072 + 9_216 + 3_072 + 16_384)
    assert counts["mamba-2 canon"] - counts["mamba-2"] == 24 * 3_072


def test_a_study_switches_them_on_and_off():
    study = load_study("limited-mini")

    def model(**entry) -> ModelConfig:
        return model_of(study, ArchitectureEntry(name="x", **entry), vocab=VOCAB)

    named = {name for name, _ in outline(model(use="rwkv-7", canon="ad")).named_parameters() if "canon" in name}
    assert {name.split(".", 2)[2] for name in named} == {"canon_a.conv.weight", "feed_forward.canon.conv.weight"}
    off = outline(model(use="transformer++ canon", canon=""))
    assert not any("canon" in name for name, _ in off.named_parameters())
    assert "canon" not in model(use="transformer++").model_dump()
    hybrid = outline(model(use="transformer++", layers=["mamba-2", "transformer++ canon-a"]))
    assert {name.split(".")[1] for name, _ in hybrid.named_parameters() if "canon" in name} == {"1", "3", "5", "7"}


@pytest.mark.parametrize(
    ("use", "canon", "message"),
    [
        ("mamba-2", "ac", "blocks of backbone 'mamba' have no feed-forward layer, so there are no places c and d"),
        ("gated-deltanet", "abcd", "place b of Canon layers is .* which gated-deltanet does not have; leave out b"),
    ],
)
def test_places_that_a_model_does_not_have(use: str, canon: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build(use, canon)


@pytest.mark.parametrize("places", ["ba", "abe", "A", "aa"])
def test_places_are_named_in_order(places: str):
    with pytest.raises(ValueError, match="must be places of Canon layers, a to d in this order"):
        ArchitectureEntry(name="x", use="transformer++", canon=places)

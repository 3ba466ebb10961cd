"""The language model around any mixer: loss, decoding, sizes, initialisation."""

import pickle
from functools import partial

import pytest
import torch
import torch._functorch.config as tracing
from torch.utils.flop_counter import FlopCounterMode

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import LayerConfig, ModelConfig, model_config
from basecap.models.generate import Sampling, generate, generate_each
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline

VOCAB = 61


def small(use: str = "transformer++", **changes) -> LanguageModel:
    """Return an initialised small model."""
    options = {"hidden": 32, "vocab": VOCAB, "layers": 2, "max_length": 32} | changes
    return LanguageModel(model_config(use, **options)).initialise(0)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backbone", BACKBONES.names())
def test_loss_decoding_and_state_agree_in_every_block_family(backbone: str):
    model = small(backbone=backbone).double()
    batch = tokens(2, 12)
    logits = model.logits(batch[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(model(batch[:, :-1], batch[:, 1:]), expected)
    caches = model.init_cache(2, 12)
    torch.testing.assert_close(model.prefill(batch[:, :5], caches), logits[:, 4])
    for t in range(5, 11):
        torch.testing.assert_close(model.step(batch[:, t : t + 1], caches), logits[:, t])
    assert not any(x.requires_grad for cache in caches for x in cache.mixer.tensors.values())
    single = model.init_cache(1, 12)
    assert sum(cache.nbytes for cache in single) == model.state_bytes(12)


@pytest.mark.skipif(not hasattr(tracing, "backward_pass_autocast"), reason="this PyTorch has no choice of autocast")
def test_compiled_training_keeps_the_gradients_of_float32_products(monkeypatch: pytest.MonkeyPatch):
    """Autocast ends before the backward pass; the filters of a long convolution are products in float32."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    batch = tokens(4, 33)
    found = []
    for compiled in (False, True):
        model = small("hyena", layers=1)
        if compiled:
            model.compile_training()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters() if ".filter." in name})
    plain, traced = found
    assert plain
    for name, grad in plain.items():
        torch.testing.assert_close(traced[name], grad, rtol=0, atol=1e-4 * grad.abs().max().item(), msg=name)


def test_first_loss_is_that_of_a_uniform_guess():
    batch = tokens(4, 33)
    loss = small()(batch[:, :-1], batch[:, 1:]).item()
    assert abs(loss - torch.tensor(float(VOCAB)).log().item()) < 0.05


def test_initialisation_depends_on_seed_and_name_alone():
    first, again, other = small(), small(), small().initialise(1)
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    deeper = small(layers=3)
    assert torch.equal(first.embedding.weight, deeper.embedding.weight)


def test_a_tied_matrix_starts_as_an_embedding():
    assert small("rwkv-6", tied=True).head_weight.abs().max() <= 1e-4 < small("rwkv-6", tied=False).head_weight.std()


def test_recomputing_activations_changes_no_gradient_and_selectively_no_product_is_repeated():
    batch, choices = tokens(2, 17), (False, "selective", True)
    models = [LanguageModel(small().config, checkpointing=choice).initialise(0) for choice in choices]
    operations = []
    for model in models:
        with FlopCounterMode(display=False) as counter:
            model(batch[:, :-1], batch[:, 1:]).backward()
        operations.append(counter.get_total_flops())
    assert operations[0] == operations[1] < operations[2]
    for model in models[1:]:
        for (name, a), b in zip(models[0].named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("backbone", BACKBONES.names())
def test_segments_are_independent_documents(backbone: str):
    model = small(backbone=backbone).double()
    first, second = tokens(1, 7, 1), tokens(1, 9, 2)
    packed = torch.cat([first, second], dim=1)
    segments = torch.tensor([[0] * 7 + [1] * 9])
    together = model.logits(packed, segments)
    torch.testing.assert_close(together[:, :7], model.logits(first))
    torch.testing.assert_close(together[:, 7:], model.logits(second))


def test_negative_targets_do_not_count():
    model = small()
    batch = tokens(2, 9)
    targets = batch[:, 1:].clone()
    targets[1] = -1
    torch.testing.assert_close(model(batch[:, :-1], targets), model(batch[:1, :-1], batch[:1, 1:]))
    losses = model.token_losses(batch[:, :-1], targets)
    assert losses.shape == (2, 8) and not losses.requires_grad
    assert (losses[1] == 0).all() and (losses[0] > 0).all()


@pytest.mark.parametrize(("hidden", "low", "high"), [(768, 109.4e6, 109.6e6), (2048, 1.25e9, 1.35e9)])
def test_reference_has_its_published_size(hidden: int, low: float, high: float):
    with torch.device("meta"):
        model = LanguageModel(model_config("transformer++", hidden=hidden, vocab=32_000))
    assert low < model.parameters_count() < high


@pytest.mark.parametrize("name", ["transformer++", "hyena", "top1-chunk-exact"])
def test_a_step_is_traced_on_meta(name: str):
    model = outline(model_config(name, hidden=64, vocab=VOCAB, max_length=32))
    batch = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    model(batch, batch).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in model.parameters())


def test_hybrid_pattern_is_repeated():
    pattern = (LayerConfig(use="transformer++"), LayerConfig(use="transformer++", mixer={"window": 4}))
    config = model_config("transformer++", hidden=32, vocab=VOCAB, layers=4, pattern=pattern)
    assert [mixer.config.window for mixer in config.build_mixers()] == [None, 4, None, 4]


def test_config_survives_json():
    config = model_config("transformer++ window", hidden=64, vocab=VOCAB, layers=2)
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("backbone", BACKBONES.names())
def test_models_can_be_pickled(backbone: str):
    model, batch = small(backbone=backbone), tokens(2, 12)
    assert torch.equal(pickle.loads(pickle.dumps(model)).logits(batch), model.logits(batch))


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(ConfigError, match=r"transformer\+\+"):
        model_config("transfomer++", hidden=32, vocab=VOCAB)
    with pytest.raises(ConfigError, match="mamba"):
        model_config("transformer++", hidden=32, vocab=VOCAB, backbone="mambo")
    wrong = model_config(
        "transformer++", hidden=32, vocab=VOCAB, pattern=(LayerConfig(use="transformer++", mixer={"windw": 3}),)
    )
    with pytest.raises(ConfigError, match="window"):
        LanguageModel(wrong)


@pytest.mark.parametrize(
    ("size", "name"),
    [({"hidden": 0}, "hidden"), ({"vocab": 1}, "vocab"), ({"layers": 0}, "depth"), ({"max_length": 0}, "max_length")],
    ids=str,
)
def test_sizes_that_build_no_model_are_refused(size, name):
    with pytest.raises(ConfigError, match=rf"option '{name}' of the model cannot be [01]: it should be "):
        model_config("mamba-2", **{"hidden": 32, "vocab": VOCAB, **size})


def test_learned_positions_refuse_to_run_past_their_end():
    model = small("transformer", max_length=16)
    with pytest.raises(ConfigError, match="16"):
        model.init_cache(1, 17)


def test_the_last_new_token_needs_no_position():
    model = LanguageModel(model_config("transformer", hidden=32, vocab=50, layers=1, max_length=32)).initialise(0)
    prompt = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(model, prompt, 1), model.logits(prompt)[:, -1:].argmax(-1))
    assert generate(model, prompt, 0).shape == (2, 0)
    with pytest.raises(ConfigError, match="learned positions end at 32 tokens; take at most that many, not 33"):
        generate(model, prompt, 2)


def test_generation_follows_the_most_probable_token_and_the_seed():
    model = small()
    prompt = tokens(2, 5)
    greedy = generate(model, prompt, 6)
    whole = prompt
    for _ in range(6):
        whole = torch.cat([whole, model.logits(whole)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(greedy, whole[:, 5:])
    sampled = [generate(model, prompt, 6, temperature=1.0, top_k=5, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(generate(model, prompt, 6, temperature=1e-320), greedy)
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])
    with pytest.raises(ConfigError, match="prompt"):
        generate(model, prompt[:, :0], 3)
    for options in ({"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1.0, "top_k": 0}):
        with pytest.raises(ConfigError, match="give "):
            generate(model, prompt, 3, **options)


def test_a_prompt_is_continued_as_if_it_were_alone():
    model = small()
    prompts = [tokens(1, length, seed)[0] for seed, length in enumerate((5, 1, 9, 5))]
    prompts.append(prompts[2])
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 4}):
        found = generate_each(model, prompts, 6, **options)
        assert found[:4] == [generate_each(model, [prompt], 6, **options)[0] for prompt in prompts[:4]]
        assert (found[4] == found[2]) == (not options)  # a prompt that is given twice has two samples
        marks = {one[1] for one in found[:3]}
        ends = [lambda added, marks=marks: added[-1] in marks] * len(prompts)
        ended = generate_each(model, prompts, 6, ends=ends, **options)
        assert all(one == whole[: len(one)] for one, whole in zip(ended, found, strict=True))
        assert all(len(one) == 6 or one[-1] in marks for one in ended) and min(map(len, ended)) <= 2


def test_samples_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).repeat(4000, 1)
    draws = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = Sampling(1.0, None, 0).choose(logits, draws).bincount(minlength=4) / 4000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.03, rtol=0)
    assert set(Sampling(1.0, 2, 0).choose(logits, draws).tolist()) == {1, 2}


def test_every_architecture_names_a_block_family():
    for name, architecture in ARCHITECTURES.items():
        assert architecture.backbone in BACKBONES.names(), name

"""Every architecture behind the interface of transformers: what is saved is loaded, and padding changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError
from basecap.hf import BasecapConfig, BasecapForCausalLM
from basecap.hf.export import write_tokenizer
from basecap.mixers import ARCHITECTURES
from basecap.models.config import model_config
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel
from tests._architectures import one_of_each_kind

VOCAB, END = 50, 0
LENGTHS = (3, 9, 6)
#: One of each kind, and what reads positions or earlier tokens in other ways.
NAMES = [
    *one_of_each_kind(),
    "transformer++ alibi",
    "transformer++ window",
    "gated-deltanet canon",
    "transformer++ ngram",
]


def config_of(name: str) -> BasecapConfig:
    layers = len(ARCHITECTURES.get(name).layers)
    return BasecapConfig.of(model_config(name, hidden=32, vocab=VOCAB, layers=layers, max_length=32), END, {})


def exported(name: str, folder: Path) -> tuple[LanguageModel, PreTrainedModel]:
    """Save a new model and load it again; return ours and the loaded one."""
    config = config_of(name)
    ours = LanguageModel(model_config(**model_options(name))).initialise(0).eval()
    BasecapForCausalLM.around(ours, config).save_pretrained(folder)
    return ours, AutoModelForCausalLM.from_pretrained(folder)


def model_options(name: str) -> dict:
    return {"use": name, "hidden": 32, "vocab": VOCAB, "layers": len(ARCHITECTURES.get(name).layers), "max_length": 32}


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return the rows in one batch, padded on a side with end-of-text, and the attention mask."""
    tokens = torch.full((len(rows), max(LENGTHS)), END)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        place = slice(-row.shape[1], None) if side == "left" else slice(row.shape[1])
        tokens[index, place], mask[index, place] = row[0], 1
    return tokens, mask


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_loaded_model_is_the_saved_one_whatever_pads_its_rows(name: str, tmp_path: Path):
    ours, loaded = exported(name, tmp_path)
    saved = {f"model.{key}": value for key, value in ours.state_dict().items()}
    assert saved.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, saved[key]) for key, value in loaded.state_dict().items())
    rows = prompts()
    alone = [ours.logits(row)[0] for row in rows]
    for side in ("left", "right"):
        tokens, mask = padded(rows, side)
        logits = loaded(tokens, attention_mask=mask).logits
        for found, kept, expected in zip(logits, mask.bool(), alone, strict=True):
            torch.testing.assert_close(found[kept], expected, rtol=1e-4, atol=1e-5)
    tokens, mask = padded(rows, "left")
    added = loaded.generate(tokens, attention_mask=mask, max_new_tokens=4, eos_token_id=None)[:, tokens.shape[1] :]
    assert torch.equal(added, torch.cat([generate(ours, row, 4) for row in rows]))


def test_losses_are_those_of_the_model_and_labels_of_minus_100_count_for_nothing(tmp_path: Path):
    ours, loaded = exported("mamba-2", tmp_path)
    tokens, mask = padded(prompts(), "right")
    labels = tokens.masked_fill(mask == 0, -100)
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    found = loaded(tokens, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(found, ours(tokens, targets))
    total = loaded(tokens, attention_mask=mask, labels=labels, num_items_in_batch=5).loss
    torch.testing.assert_close(total, found * (sum(LENGTHS) - 3) / 5)
    assert loaded(tokens, attention_mask=mask, labels=labels, return_dict=False)[0] == found
    assert loaded(tokens, logits_to_keep=2).logits.shape == (3, 2, VOCAB)


def test_a_new_model_starts_by_its_recipe():
    made = AutoModelForCausalLM.from_config(config_of("rwkv-7"))
    expected = LanguageModel(model_config(**model_options("rwkv-7"))).initialise(0)
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), expected.parameters(), strict=True))


def test_beams_continue_what_they_have_read(tmp_path: Path):
    _, loaded = exported("rwkv-7", tmp_path)
    tokens, mask = padded(prompts(), "left")
    options = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 3, "eos_token_id": None}
    with_cache, without = (loaded.generate(tokens, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without)


def test_generate_ends_at_a_text(tmp_path: Path):
    _, loaded = exported("rwkv-7", tmp_path)
    write_tokenizer(byte_tokenizer(), tmp_path)
    tokens, mask = padded(prompts(), "left")
    options = {"attention_mask": mask[:1], "max_new_tokens": 5, "eos_token_id": None}
    whole = loaded.generate(tokens[:1], **options)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    stop = tokenizer.decode(whole[0, tokens.shape[1] + 1])
    ended = loaded.generate(tokens[:1], stop_strings=[stop], tokenizer=tokenizer, **options)
    assert torch.equal(ended, whole[:, : ended.shape[1]]) and ended.shape[1] < whole.shape[1]


def test_activations_that_are_computed_again_give_the_same_gradients():
    model, tokens = BasecapForCausalLM(config_of("gated-deltanet")), prompts()[1]
    loss = model(tokens, labels=tokens).loss
    expected = torch.autograd.grad(loss, [*model.parameters()])
    model.activation_checkpointing_enable()
    model.train()
    loss = model(tokens, labels=tokens).loss
    assert model.model.checkpointing
    assert all(map(torch.equal, torch.autograd.grad(loss, [*model.parameters()]), expected))
    model.activation_checkpointing_disable()
    model(tokens)
    assert not model.model.checkpointing


def test_one_sentence_for_what_cannot_be_read():
    model = BasecapForCausalLM(config_of("transformer++"))
    tokens = prompts()[0]
    with pytest.raises(ConfigError, match=r"input_ids \(1, 0\) have no token; begin an empty text with bos_token"):
        model(tokens[:, :0], attention_mask=tokens[:, :0])
    with pytest.raises(ConfigError, match="a prompt to continue has no token; begin an empty one with bos_token"):
        model.generate(tokens.repeat(2, 1), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]), max_new_tokens=2)
    with pytest.raises(ConfigError, match="has a 0 between tokens of a row"):
        model(tokens, attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(ConfigError, match=r"is padded on the right; set tokenizer\.padding_side = 'left'"):
        model.generate(tokens, attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=2)
    with pytest.raises(ConfigError, match="read input_ids; leave out inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ConfigError, match="return logits alone"):
        model(tokens, output_hidden_states=True)


def test_a_folder_without_some_weights_is_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    exported("transformer++", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the folder lacks the weights of norm\.weight; export the model again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_plugin_that_is_not_loaded_is_named(tmp_path: Path):
    config = config_of("transformer++")
    config.plugins = {"0" * 64: "elsewhere.py"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trained with another version of elsewhere\.py; load that one"):
        BasecapForCausalLM(AutoConfig.from_pretrained(tmp_path))
    config.language_model["layers"][0]["use"] = "elsewhere"
    with pytest.raises(ConfigError, match=r"needs the plugin elsewhere\.py; call basecap\.plugins\.load_plugin"):
        BasecapForCausalLM(config)


def test_the_trainer_of_transformers_takes_a_step(tmp_path: Path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    ours, loaded = exported("mamba-2", tmp_path)
    rows = [{"input_ids": row[0], "labels": row[0]} for row in prompts()[:1] * 4]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trained"),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    found = Trainer(loaded, arguments, train_dataset=rows).train()
    tokens = prompts()[0]
    assert found.training_loss == pytest.approx(ours(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-5)
    assert loaded(tokens, labels=tokens).loss < found.training_loss


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", ["gated-deltanet", "mamba-2", "mamba-3 mimo"])
def test_lora_trains_its_own_weights_alone(name: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    _, loaded = exported(name, tmp_path)
    adapted = peft.get_peft_model(loaded, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = prompts()[1]
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name for name, value in adapted.named_parameters() if value.grad is not None}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name} != set()
    assert adapted.generate(input_ids=tokens, max_new_tokens=2, eos_token_id=None).shape == (1, tokens.shape[1] + 2)

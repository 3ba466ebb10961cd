"""`basecap export`: a folder that others load, whole or not there at all."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from basecap.cli import app
from basecap.data.tokenizer import byte_tokenizer, train_bpe
from basecap.errors import BasecapError, ConfigError, DataError
from basecap.evals import Context
from basecap.hf import export as exporting
from basecap.hf.card import Card
from basecap.hf.export import export, write_tokenizer
from basecap.models.config import model_config
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel
from basecap.plan.workloads import recorded_data
from basecap.plugins import load_plugin
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.report import write_report
from basecap.run.provenance import sources
from basecap.run.trained import load_trained
from basecap.study.config import validate
from basecap.testing.new_mixer import write_mixer
from tests.records.made_up import change
from tests.run._execute import run
from tests.small_study import WORDS, small_study
from tests.train.conftest import save

TEXTS = ["the river walks over a stone", "<|endoftext|> is text", "näher\n\tan  ð", ""]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> StudyRecords:
    """Train one run, and write the report."""
    root = tmp_path_factory.mktemp("exported")
    content = small_study(root / "text")
    content["train"] |= {"tokens": 512, "eval_every": 256, "keep": "all"}
    content["architectures"] = ["transformer++"]
    (root / "tiny.yaml").write_text(yaml.safe_dump(content))
    assert [info.status for info in run(root / "tiny.yaml", root / "out")] == ["finished"]
    write_report([root / "out"], root / "out")
    return StudyRecords(root / "out")


@pytest.fixture(scope="module")
def folder(study: StudyRecords, tmp_path_factory) -> Path:
    return Path(export(study.run("transformer++", 0).path, str(tmp_path_factory.mktemp("to") / "folder")))


def test_the_folder_has_weights_tokenizer_and_settings_and_nothing_else(folder: Path):
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who reads one reads all
    assert "auto_map" not in json.loads((folder / "config.json").read_text())


@torch.no_grad()
def test_what_is_loaded_continues_a_text_as_the_run_does(folder: Path, study: StudyRecords):
    ours = load_trained(study.run("transformer++", 0).path, device="cpu").network
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the river", return_tensors="pt").input_ids
    expected = generate(ours, ids, 8)
    assert torch.equal(loaded.generate(ids, max_new_tokens=8, eos_token_id=None)[:, ids.shape[1] :], expected)
    assert loaded.generation_config.eos_token_id == 256 == tokenizer.pad_token_id


def test_large_weights_are_several_files_with_an_index(study: StudyRecords, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(exporting, "LARGEST_FILE", "10KB")
    made = Path(export(study.run("transformer++", 0).path, str(tmp_path / "x")))
    files = {*json.loads((made / "model.safetensors.index.json").read_text())["weight_map"].values()}
    assert len(files) > 1 and all((made / name).is_file() for name in files)
    ours = load_trained(study.run("transformer++", 0).path, device="cpu").network.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(made).model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in loaded.items()) and loaded.keys() == ours.keys()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_tokenizer_gives_our_ids(kind: str, tmp_path: Path):
    ours = byte_tokenizer() if kind == "bytes" else train_bpe([" ".join(WORDS["prose"])] * 20, 300)
    write_tokenizer(ours, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text).input_ids for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert theirs.eos_token_id == ours.end_of_text == theirs.bos_token_id
    assert theirs.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_a_plugin_lies_beside_the_weights_that_need_it(study: StudyRecords, tmp_path: Path):
    plugin = tmp_path / "passing_mean.py"
    write_mixer(plugin)
    load_plugin(plugin)
    run_of_plugin = RunRecords(Path(shutil.copytree(study.path, tmp_path / "copy")) / "runs/transformer++-s0")
    model = LanguageModel(model_config("passing-mean", hidden=16, vocab=257, layers=1, max_length=32)).initialise(0)
    save(run_of_plugin.path, model, torch.optim.AdamW(model.parameters()), 9)
    change(run_of_plugin.path / "run.json", plugins=sources(model.config))
    made = Path(export(run_of_plugin.path, str(tmp_path / "mean")))
    assert (made / "passing_mean.py").read_text() == plugin.read_text()
    assert list(json.loads((made / "config.json").read_text())["plugins"].values()) == ["passing_mean.py"]
    card = (made / "README.md").read_text()
    assert "`basecap.plugins.load_plugin(Path(FOLDER) / 'passing_mean.py')`" in card and "\n2,304 tokens, " in card
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert loaded.model.config == model.config
    prompts = tokenizer(["the river", "a"], return_tensors="pt", padding=True)
    added = loaded.generate(**prompts, max_new_tokens=4, eos_token_id=None)[:, prompts.input_ids.shape[1] :]
    alone = [generate(model, tokenizer(text, return_tensors="pt").input_ids, 4) for text in ("the river", "a")]
    assert torch.equal(added, torch.cat(alone))


def test_the_card_says_what_it_was_trained_on_and_what_was_found(folder: Path, study: StudyRecords):
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers" and card.split("---\n")[2].startswith("\n# transformer++, seed 0\n")
    results = study.results()["studies"][0]
    code = next(point for point in reversed(results["points"]) if point["name"] == "transformer++")["domains"]["code"]
    for said in (
        "512 tokens, ",
        "| prose | training | source text | not recorded |",
        "| code | testing | source text | not recorded |",
        "It is the reference that other architectures of its study are compared with.",
        f"| code | {code['loss']:.3f} | {code['bits_per_byte']:.3f} |",
        "lr: 0.01",
    ):
        assert said in card


def test_the_card_gives_a_verdict_with_its_interval_and_the_age_of_the_reference(study: StudyRecords):
    gap = {"value": 0.2, "low": 0.1, "high": 0.3}
    row = {"name": "b", "verdict": "early", "words": "it copies 4 %", "gap": gap, "seeds": [0, 1]}
    maturity = {"state": "early", "words": "it copies 4 % only"}
    found = {"reference": "a", "comparisons": [row], "maturity": maturity, "confidence": 0.95, "points": []}
    held = validate(study.study(), "study.yaml")
    info = RunInfo(name="b", seed=0, use="rwkv-7", status="finished", message="")
    own = {"fault": "fails", "tokens": 9, "model": {}, "end_of_text": "<e>", "plugins": []}
    card = Card(info=info, study=held, results=found, step=None, **own).text()
    assert (
        "Verdict at the end of its runs: **early**." in Card(info=info, study=held, results=found, step=3, **own).text()
    )
    assert (
        "Verdict: **early**. It copies 4 %. Out of domain its loss is +0.200 nats per token (+0.100 to +0.300) "
        "relative to a at equal loss in domain, over 2 runs; the interval holds with 95 % for all rows of its table "
        "together. The reference is early: it copies 4 % only." in card
    )
    assert "**Its architecture fails.**" in card
    row["seeds"], maturity["state"] = [0], "maturity unknown"
    card = Card(info=info, study=held, results=found, step=None, **own).text()
    assert "over one run; the interval" in card and "The maturity of the reference is unknown: it copies" in card


def test_the_scores_of_lm_eval_are_ours(folder: Path, study: StudyRecords, tmp_path: Path, monkeypatch):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from tests.evals.test_few_shot import few_shot, write_choices

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_choices(tmp_path / "tasks", count=20)
    asked = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        batch_size=4,
        max_length=32,
    )
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    found = simple_evaluate(asked, tasks=["choices"], task_manager=manager, bootstrap_iters=0)["results"]["choices"]
    context = context_of(study)
    with torch.no_grad():
        model = load_trained(study.run("transformer++", 0).path, device="cpu").network
        ours = few_shot(tmp_path / "tasks", "choices").run(model, context).measurements
    assert {one.metric: one.value for one in ours} == {"acc": found["acc,none"], "acc_norm": found["acc_norm,none"]}


def context_of(study: StudyRecords) -> Context:
    data = recorded_data(validate(study.study(), "study.yaml"), study.path)
    return Context(data=data, device=torch.device("cpu"), autocast=contextlib.nullcontext)


def test_the_command_names_the_folder_and_refuses_one_that_exists(study: StudyRecords, folder: Path, tmp_path: Path):
    path, runner = str(study.run("transformer++", 0).path), CliRunner()
    done = runner.invoke(app, ["export", path, "--to", str(tmp_path / "new")])
    assert done.exit_code == 0 and done.stdout == f"model: {tmp_path / 'new'}\n" and done.stderr == ""
    for arguments, message in (
        ([path, "--to", str(folder)], f"{folder} exists; give a directory that does not, or remove it."),
        ([path, "--to", "x", "--step", "3"], f"{path} has no weights of step 3; give one of 1, 2."),
        ([str(folder), "--to", "x"], f"{folder} is not the directory of a run; give DIR/runs/NAME-sSEED."),
    ):
        failed = runner.invoke(app, ["export", *arguments])
        assert isinstance(failed.exception, ConfigError) and str(failed.exception) == message


def test_the_weights_of_a_step_are_exported_with_their_own_losses(study: StudyRecords, folder: Path, tmp_path: Path):
    run, made = study.run("transformer++", 0).path, tmp_path / "first"
    assert CliRunner().invoke(app, ["export", str(run), "--to", str(made), "--step", "1"]).exit_code == 0
    ours = load_trained(run, step=1, device="cpu").network.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(made).model.state_dict()
    assert loaded.keys() == ours.keys() and all(torch.equal(value, ours[name]) for name, value in loaded.items())
    first, last = ((place / "README.md").read_text() for place in (made, folder))
    found = [point["domains"]["code"]["loss"] for point in study.results()["studies"][0]["points"]]
    for card, tokens, loss in ((first, 256, found[0]), (last, 512, found[1])):
        assert f"\n{tokens} tokens, " in card and f"documents after {tokens} tokens:" in card
        assert f"| code | {loss:.3f} |" in card
    assert " The weights are those of step 1, before the end of its run." in first
    assert "before the end" not in last and "passes over its training text" not in first


def test_the_command_says_what_to_install(study: StudyRecords, tmp_path: Path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("basecap.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = str(study.run("transformer++", 0).path)
    failed = CliRunner().invoke(app, ["export", path, "--to", str(tmp_path / "x")])
    assert str(failed.exception) == "basecap.hf needs the transformers library; install basecap[hf]."


def test_nothing_is_left_of_an_export_that_fails(study: StudyRecords, tmp_path: Path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_tokenizer", fail)
    with pytest.raises(
        DataError, match=r"cannot write .*: the disk is full; free disk space or give another directory"
    ):
        export(study.run("transformer++", 0).path, str(tmp_path / "x"))
    assert not [*tmp_path.iterdir()]


def test_a_mixer_that_does_not_decode_is_not_exported(study: StudyRecords, tmp_path: Path, monkeypatch):
    def step(*_):
        raise RuntimeError("no step")

    monkeypatch.setattr("basecap.mixers.attention.Attention.step", step)
    with pytest.raises(ConfigError, match=r"its mixer does not decode \(RuntimeError: no step\); write its init_"):
        export(study.run("transformer++", 0).path, str(tmp_path / "x"))
    assert not [*tmp_path.iterdir()]


def test_a_run_without_checkpoint_or_tokenizer_is_refused(study: StudyRecords, tmp_path: Path):
    copy = StudyRecords(Path(shutil.copytree(study.path, tmp_path / "copy")))
    path = copy.run("transformer++", 0).path
    task = {"name": "t", "task": {"train": ["mqar"], "test": ["mqar"]}, "architectures": ["transformer++"]}
    held = (copy.path / "study.yaml").read_text()
    (copy.path / "study.yaml").write_text(yaml.safe_dump({**yaml.safe_load(held), "data": None} | task))
    with pytest.raises(
        BasecapError, match="was trained on a task, whose tokens are no text; take a run of a study of text"
    ):
        export(path, str(tmp_path / "x"))
    (copy.path / "study.yaml").write_text(held)
    shutil.rmtree(path / "resume")
    with pytest.raises(BasecapError, match="has no checkpoint"):
        export(path, str(tmp_path / "x"))


def test_the_hub_needs_a_token_and_gets_one_commit(study: StudyRecords, monkeypatch):
    path = study.run("transformer++", 0).path
    for name in ("", "me/models/one", "https://huggingface.co/me/model"):
        with pytest.raises(ConfigError, match=f"hub:{name} is no name of a repository; give hub:OWNER/NAME"):
            export(path, f"hub:{name}")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="hub:me/model needs a token of the Hugging Face hub; log in with `hf auth"):
        export(path, "hub:me/model")
    calls = []

    class Api:
        def __init__(self, token):
            calls.append(token)

        def create_repo(self, name, exist_ok):
            calls.append((name, exist_ok))
            return f"https://hub/{name}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())[:2], commit_message))

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(exporting, "refuse_unreachable", lambda *_: None)
    assert export(path, "hub:me/model") == "https://hub/me/model"
    files = ["README.md", "config.json"]
    assert calls == ["secret", ("me/model", True), ("me/model", files, "Model exported by basecap")]

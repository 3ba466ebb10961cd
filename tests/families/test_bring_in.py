"""`basecap import`: a published model stands in a report beside those of the study, without a verdict."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from typer.testing import CliRunner

import basecap
from basecap.analysis import analyse
from basecap.cli import app
from basecap.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from basecap.errors import BasecapError, ConfigError, DataError
from basecap.families import bring_in
from basecap.families.bring_in import import_model
from basecap.hf.export import export
from basecap.records import RunRecords, StudyRecords
from basecap.report import write_report
from basecap.report.export import sheets
from basecap.report.imported import ELSEWHERE, imported_tables
from basecap.run.executors import Resources
from basecap.run.stored_weights import evaluate_directory
from basecap.train.checkpoint import load_stored
from tests.run._execute import run
from tests.small_study import WORDS, small_study


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("brought-in")
    content = small_study(root / "text")
    content["train"] |= {"tokens": 512, "eval_every": 512}
    content["architectures"] = ["transformer++"]
    (root / "tiny.yaml").write_text(yaml.safe_dump(content))
    assert run(root / "tiny.yaml", root / "out")[0].status == "finished"
    return root / "out"


@pytest.fixture
def study(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "out"))


def published(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a tiny random Pythia with a tokenizer."""
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=tokenizer.vocab_size + 3, **options))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.description)
    return folder


def measure(study: Path, only: Sequence[str] = ()) -> list[str]:
    said: list[str] = []
    on = Resources(device="cpu")
    failed = evaluate_directory(study, add=(), at=None, only=only, on=on, plugins=(), log=said.append)
    assert failed == 0
    return said


def test_imported_models_are_measured_and_stand_beside_own_ones(study: Path, tmp_path: Path):
    before = json.loads(write_report([study], study).page.with_name("results.json").read_text())["studies"][0]
    assert "imported" not in before
    other = train_bpe([" ".join(WORDS["prose"] + WORDS["notes"])] * 20, 300)
    import_model(published(tmp_path / "tiny-bpe", other), study)
    import_model(published(tmp_path / "tiny-bytes", byte_tokenizer()), study, "bytes")
    measure(study)
    held = [path.read_bytes() for path in sorted((study / "imported").glob("*/evals.jsonl"))]
    measure(study)  # nothing is left to do
    assert held == [path.read_bytes() for path in sorted((study / "imported").glob("*/evals.jsonl"))]
    report = write_report([study], study)
    (found,) = report.studies
    assert [(row.name, row.use, row.origin["tokenizer"]) for row in found.imported] == [
        ("bytes", "pythia", "study"),
        ("tiny-bpe", "pythia", "own"),
    ]
    assert found.imported[0].origin["folder"] == "tiny-bytes" and found.imported[0].parameters
    for row in found.imported:
        assert row.domains.keys() == {"prose", "notes", "code"}
        assert {one.eval for one in row.evaluations} == {"copying"}
    after = json.loads((study / "results.json").read_text())["studies"][0]
    assert after["comparisons"] == before["comparisons"] and after["runs"] == before["runs"]
    costs, others = imported_tables(found)
    assert [row[:2] for row in costs.rows] == [
        ["transformer++", "1 run, 512 tokens"],
        ["bytes", ELSEWHERE],
        ["tiny-bpe", ELSEWHERE],
    ]
    assert others.header[3:] == ["transformer++", "bytes", "tiny-bpe"] and len(others.rows) == 3
    assert all(isinstance(cell, float) for row in costs.rows for cell in row[4:])
    names = [sheet.name for sheet in sheets(found)]
    assert names[names.index("imported") :][:2] == ["imported", "imported-evaluations"]
    page = report.page.read_text()
    assert "<h2>Imported models</h2>" in page and "tokens differ: tiny-bpe has its own tokenizer." in page


def test_losses_are_those_of_the_published_model_per_byte(study: Path, tmp_path: Path):
    """An untrained model with an own tokenizer: its losses in nats, over the bytes of the documents."""
    tokenizer = train_bpe([" ".join(WORDS["code"])] * 20, 300)
    made = import_model(published(tmp_path / "tiny", tokenizer), study)
    measure(study)
    model = load_stored(made.weights / "step-0")
    losses, sizes = [], []
    folder = Path(yaml.safe_load((study / "study.yaml").read_text())["data"]["path"])
    held_out = {record.subset: record.n for record in made.evals() if record.metric == "loss"}
    for path in sorted((folder / "code").iterdir()):
        ids = [tokenizer.end_of_text, *tokenizer.encode(path.read_text())]
        windows = [torch.tensor([ids[start : start + 33]]) for start in range(0, len(ids) - 1, 32)]
        losses.append(sum(model.token_losses(part[:, :-1], part[:, 1:]).sum().item() for part in windows))
        sizes.append(len(path.read_bytes()))
    bits = next(one for one in made.evals() if (one.subset, one.metric) == ("code", "bits_per_byte"))
    assert held_out["code"] > 0
    assert bits.value == pytest.approx(sum(losses) / sum(sizes) / 0.6931471805599453, rel=0.05)


def test_an_imported_model_is_loaded_and_evaluated_by_its_directory(study: Path, tmp_path: Path):
    tokenizer = train_bpe([" ".join(WORDS["prose"])] * 20, 300)
    made = import_model(published(tmp_path / "tiny", tokenizer), study)
    loaded = basecap.load(made.path, device=torch.device("cpu"))
    assert (loaded.name, loaded.step, loaded.tokenizer.fingerprint) == ("tiny", 0, tokenizer.fingerprint)
    assert loaded.generate("the river", 4, temperature=0.0).startswith("the river")
    for wrong, message in (
        (lambda: loaded.generate_each("the river"), "prompts is one text; give a list of texts."),
        (lambda: loaded.generate_each(["a"], stops="river"), "stops is one text; give a list of texts."),
        (lambda: loaded.generate_each(["a"], stops=[1]), "1 is not text; give a str."),
        (lambda: loaded.generate("a", 0), "tokens is 0; give a whole number from 1 to 1,048,576."),
        (lambda: loaded.generate("a", 2.5), "tokens is 2.5; give a whole number from 1 to 1,048,576."),
        (lambda: loaded.generate("a", 2**21), "tokens is 2097152; give a whole number from 1 to 1,048,576."),
        (lambda: loaded.generate("a", temperature="hot"), "temperature is 'hot'; give 0 or a positive number."),
        (lambda: loaded.generate("a", seed="x"), "seed is 'x'; give a whole number."),
        (
            lambda: loaded.generate("a", top_k=True),
            "top_k is True; give a whole number, at least 1, or None for all tokens.",
        ),
        (lambda: loaded.losses(b"a"), "b'a' is not text; give a str."),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert str(caught.value) == message
    (other,) = [import_model(published(tmp_path / "other", byte_tokenizer()), study)]
    measure(made.path)
    assert {one.eval for one in made.evals()} == {"domain-loss", "copying"} and not other.evals()
    with pytest.raises(ConfigError, match="tiny is tiny alone; leave out --only, or give "):
        measure(made.path, only=["transformer++"])
    with pytest.raises(ConfigError, match="was trained elsewhere; give transformers the folder that it came from"):
        export(made.path, str(tmp_path / "x"))


def test_the_command_says_what_comes_next(study: Path, tmp_path: Path):
    folder = published(tmp_path / "tiny", byte_tokenizer())
    done = CliRunner().invoke(app, ["import", str(folder), "--out", str(study), "--name", "neo x"])
    (made,) = StudyRecords(study).imported()
    assert done.stdout == f"imported: {made.path}; measure it with `basecap eval {study}`\n" and done.exit_code == 0
    assert made.info().status == "imported" and made.info().name == "neo x"
    (exported := tmp_path / "exported").mkdir()
    (exported / "config.json").write_text('{"model_type": "basecap"}')
    with pytest.raises(ConfigError, match="was exported by basecap"):  # and not that it needs another name
        import_model(exported, study, "neo x")
    for arguments, message in (
        (["--out", str(study), "--name", "neo x"], "has a model called 'neo x' already; give another name with --name"),
        (["--out", str(study), "--name", "transformer++"], "has a model called 'transformer++' already"),
        (["--out", str(study), "--name", ""], "'' is no name for tables; give one line of text with --name."),
        (["--out", str(tmp_path / "none")], f"holds no study (no study.yaml); did you mean '{study}'?"),
    ):
        failed = CliRunner().invoke(app, ["import", str(folder), *arguments])
        assert isinstance(failed.exception, ConfigError) and message in str(failed.exception)


def test_nothing_is_left_of_an_import_that_fails(study: Path, tmp_path: Path, monkeypatch):
    folder = published(tmp_path / "tiny", byte_tokenizer())
    with monkeypatch.context() as patched:

        def fail(*_):
            raise OSError(28, "No space left on device")

        patched.setattr(RunRecords, "write_info", fail)
        with pytest.raises(DataError, match="the disk is full; free disk space or"):
            import_model(folder, study)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a valid tokenizer.json; download it again\.$"):
        import_model(folder, study)
    (folder / "tokenizer.json").write_text(whole)
    index = folder / "model.safetensors.index.json"
    for content in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 5}}):
        index.write_text(json.dumps(content))
        with pytest.raises(DataError, match="names no files of weights; restore it"):
            import_model(folder, study)
    index.unlink()
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.embed_in.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"embed_in\.weight has values that are no numbers; restore its file"):
        import_model(folder, study)
    published(folder, byte_tokenizer())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BasecapError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        import_model(folder, study)
    (folder / "tokenizer.json").write_text(train_bpe([" ".join(WORDS["code"])] * 20, 300).description)
    with pytest.raises(ConfigError, match="the model has 260 token ids but the tokenizer has"):
        import_model(folder, study)
    task = {
        "task": {"train": ["mqar"], "test": ["mqar"]},
        "data": None,
        "name": "t",
        "architectures": ["transformer++"],
    }
    held = yaml.safe_load((study / "study.yaml").read_text())
    (study / "study.yaml").write_text(yaml.safe_dump(held | task))
    with pytest.raises(ConfigError, match="is a study of tasks, whose tokens no published model knows"):
        bring_in.import_model(folder, study)
    assert not StudyRecords(study).imported() and not [*(study / "imported").glob("*")]


def test_a_study_without_imported_models_is_analysed_as_before(study: Path):
    (found,) = analyse([study])
    assert found.imported == [] and imported_tables(found) is None

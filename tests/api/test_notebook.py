"""The notebook and the page about Python run as written, on a study that is trained in seconds."""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

import basecap
from basecap import mixers
from basecap.errors import ConfigError
from basecap.plan.workloads import recorded_data
from basecap.records import RunRecords, StudyRecords
from basecap.study.config import load_study
from basecap.system.files import read_json, write_json
from tests.api.notebook import code_cells, play
from tests.small_study import small_study, write_text

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@dataclass(frozen=True)
class Played:
    """What a notebook left: its directory, what its cells displayed, by their ids, and its variables."""

    place: Path
    displayed: dict[str, Any]
    names: dict[str, Any]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Run the cells of the notebook but the installation, with a study of 20 steps whose models count as trained."""
    place = tmp_path_factory.mktemp("notebook")
    study = small_study(place / "text")
    write_text(place / "text", documents=200, words=8)
    study["train"] |= {"tokens": 5120, "eval_every": 512}
    study |= {"architectures": ["transformer++"], "any_architecture": True, "evals": ["domain-loss"], "seeds": [0]}
    (place / "tiny.yaml").write_text(yaml.safe_dump(study))
    displayed: dict[str, Any] = {}
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(place):
        patch.setattr("basecap.run.leak_test.FinalLeakTest._start", lambda test: None)  # no leak test in a new process
        cells = code_cells(NOTEBOOK)
        assert cells.pop("install").startswith("%pip install")
        for name, cell in cells.items():
            if name == "study":  # in so few steps no model is better than a bigram model
                records = StudyRecords(place / "runs" / "notebook")
                records.write_environment({**records.environment(), "bigram_loss": 50.0})
            displayed[name] = play(cell, names)
            if name == "choice":
                names |= {"STUDY": "tiny.yaml", "OPTIONS": "--device cpu"}
    yield Played(place, displayed, names)


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    run = [(cell["outputs"], cell["execution_count"]) for cell in cells if cell["cell_type"] == "code"]
    assert run and all(found == ([], None) for found in run)


def test_the_notebook_shows_the_gap_inline(played):
    findings = played.displayed["study"]._repr_html_()
    assert "<h3>tiny</h3>" in findings and "<td" in findings and "fading-mean" in findings
    for name in ("figure", "along"):
        picture = ElementTree.fromstring(played.displayed[name]._repr_mimebundle_()["image/svg+xml"])
        assert "fading-mean" in "".join(picture.itertext())


def test_the_page_about_python_runs(played, capsys):
    code = re.findall(r"```python\n(.*?)```", (NOTEBOOK.parent / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    with contextlib.chdir(played.place):
        (played.place / "runs" / "quickstart").symlink_to("notebook")
        for block in code:
            play(block, names)
    printed = capsys.readouterr().out
    assert len(code) == 4 and "transformer++ 0 5120" in printed and "The list of" in printed
    assert (played.place / "gaps.pdf").read_bytes().startswith(b"%PDF-")
    (said,) = re.findall(r"# (runs/quickstart has no .*)", code[-1])
    assert said in printed


def test_the_loss_of_a_document_is_the_one_in_the_records(played):
    """Of documents longer than a window."""
    out = played.place / "runs" / "notebook"
    study = load_study(str(out / "study.yaml"))
    held = recorded_data(study, out).documents("test", "prose")
    run = basecap.open(out).run("transformer++")
    trained = run.model(device="cpu")
    (history,) = RunRecords(run.path).documents("domain-loss", [trained.step])
    recorded = history.nats[0, history.documents.subsets["prose"]]
    found = [trained.losses(trained.tokenizer.decode(held.tokens(index))) for index in range(5)]
    assert all(len(losses) > study.text.seq_len for losses in found)
    np.testing.assert_allclose([float(losses.double().sum()) for losses in found], recorded[:5], rtol=1e-6)


def test_an_unfinished_run_has_the_models_of_its_stored_steps(played, tmp_path):
    out = shutil.copytree(played.place / "runs" / "notebook", tmp_path / "stopped")
    run = basecap.open(out).run("transformer++")
    content = read_json(run.path / "run.json")
    for status, state in (("running", "is not finished"), ("failed", r"failed \(the loss is NaN\)")):
        write_json(run.path / "run.json", content | {"status": status, "message": "the loss is NaN."})
        with pytest.raises(ConfigError, match=rf"{state}; run its study again to resume it, or load .* step= \(.*20\)"):
            run.model()
    assert run.model(step=20, device="cpu").step == 20
    with pytest.raises(ConfigError, match=r"has no weights of step 7; give one of .*20\."):
        run.model(step=7, device="cpu")


def test_a_plugin_that_is_not_given_is_named(played, monkeypatch):
    run = played.place / "runs" / "notebook" / "runs" / "fading-mean-s0"
    monkeypatch.delitem(sys.modules, "basecap_plugin_fading_mean")
    monkeypatch.delitem(mixers.ARCHITECTURES._entries, "fading-mean")
    with pytest.raises(ConfigError, match=r"a plugin that is not given; add plugins=\['fading_mean\.py'\]\.$"):
        basecap.load(run)


def test_what_cannot_be_scored_is_refused(played):
    trained = played.names["trained"]
    with pytest.raises(ConfigError, match="the text is empty; give at least one character"):
        trained.losses("")
    with pytest.raises(ConfigError, match="not text in UTF-8; convert it"):
        trained.generate("\udcff")
    assert trained.tokens("").tolist() == [[trained.tokenizer.end_of_text]]
    assert (
        repr(trained)
        == f"TrainedModel(fading-mean, seed 0, step 20, {trained.network.parameters_count():,} parameters, cpu)"
    )

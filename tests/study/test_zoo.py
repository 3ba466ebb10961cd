"""Every architecture there is trains, evaluates and saves: the built-in study `zoo` on made-up text."""

from pathlib import Path

import basecap.mixers
from basecap.mixers import ARCHITECTURES
from basecap.records import StudyRecords
from basecap.study.config import load_study
from basecap.study.execute import execute
from tests.study.conftest import write_text


def test_the_zoo_is_complete():
    ours = str(Path(basecap.mixers.__file__).parent)  # other tests register plugins
    known = {name for name in ARCHITECTURES.names() if ARCHITECTURES.origin(name).startswith(ours)}
    assert {entry.use for entry in load_study("zoo").architectures} == known


def test_every_architecture_trains(tmp_path):
    text = write_text(tmp_path / "text", documents=12, words=60)
    settings = [f"data={{source: text, path: {text}, tokenizer: bytes, seq_len: 40, train: [prose], ood: [code]}}"]
    settings += ["train.tokens=480", "train.batch=4", "train.eval_every=480", "model={hidden: 32, layers: 1}"]
    study = load_study("zoo", settings)
    names = {entry.name for entry in study.architectures}
    said: list[str] = []
    infos = execute(study, tmp_path / "out", only=names, device="cpu", plugins=(), say=said.append)
    assert not said and {info["status"] for info in infos} == {"finished"}
    for run in StudyRecords(tmp_path / "out").runs():
        assert len(run.metrics()) == 3
        assert {record.subset for record in run.evals()} == {"prose", "code"}

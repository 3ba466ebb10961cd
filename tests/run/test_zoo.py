"""The built-in study `zoo` on made-up text: it is complete, and every mixer and every backbone trains."""

from pathlib import Path

import pytest
import torch

from basecap.mixers import ARCHITECTURES
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import plan_runs
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import StudyConfig, load_study
from basecap.testing.fresh_process import FreshProcess, Question, StoredModel, draws_of
from basecap.train.checkpoint import latest, load_unaveraged
from tests.small_study import write_text

#: Shorter than the study's own, so that made-up text is enough; the depths are the study's.
SETTINGS = ["train.tokens=480", "train.batch=4", "train.eval_every=480", "model.hidden=32"]


@pytest.fixture
def zoo(tmp_path: Path) -> StudyConfig:
    text = write_text(tmp_path / "text", documents=12, words=60)
    data = (
        f"data={{source: text, path: {text}, tokenizer: bytes, seq_len: 40, train: [prose], ood: [code], workers: 1}}"
    )
    return load_study("zoo", [data, *SETTINGS])


def test_the_zoo_is_complete():
    known = {name for name in ARCHITECTURES.names() if ARCHITECTURES.built_in(name)}  # other tests register plugins
    assert {entry.use for entry in load_study("zoo").architectures} == known


def test_every_model_holds_what_its_architecture_is_named_after(zoo: StudyConfig):
    for study in (load_study("zoo"), zoo):
        length = study.data.seq_len
        for run in plan_runs(study, vocab=256):
            with torch.device("meta"):
                blocks = LanguageModel(run.model).blocks
            mixers = [block.mixer for block in blocks]
            kinds = [choice.mixer for choice in ARCHITECTURES.get(run.use).layers]
            assert {type(mixer) for mixer in mixers} == set(kinds), run.name
            # The second layer is where RWKV-7 mixes in the first one's values.
            assert len(mixers) >= max(2, len(set(kinds))), run.name
            windows = [mixer.config.window for mixer in mixers if getattr(mixer.config, "window", None)]
            assert bool(windows) == (run.use in ("based", "nsa", "transformer++ window")), run.name
            assert all(2 * window <= length for window in windows), run.name
            long = [mixer for mixer in mixers if getattr(mixer, "long_conv", None) is not None]
            shares = {"mamba-1 global selection": 1.0, "mamba-1 global selection lm": 0.25}
            assert len(long) / len(mixers) == shares.get(run.use, 0.0), run.name
            chunks = [mixer.config.chunk for mixer in mixers if hasattr(mixer.config, "chunk")]
            assert bool(chunks) == run.use.startswith("top1-chunk"), run.name
            assert all(2 * chunk < length for chunk in chunks), run.name  # the third chunk forces a choice
            chosen = [m.config.top * getattr(m.config, "block", 1) for m in mixers if hasattr(m.config, "top")]
            assert bool(chosen) == (run.use in ("nsa", "dsa", "dsa by mass")), run.name
            assert all(tokens < length for tokens in chosen), run.name


def test_every_mixer_and_backbone_trains_and_passes_the_leak_test(zoo: StudyConfig, tmp_path: Path):
    # What is left out differs in options of a mixer, which `tests/mixers/test_conformance.py` proves.
    parts = {
        run.name: {run.model.backbone, *(choice.mixer for choice in ARCHITECTURES.get(run.use).layers)}
        for run in plan_runs(zoo, vocab=256)
    }
    names, seen = {zoo.reference}, parts[zoo.reference]
    for name in sorted(parts, key=lambda name: len(parts[name]), reverse=True):
        if not parts[name] <= seen:
            names, seen = names | {name}, seen | parts[name]
    said: list[str] = []
    infos = execute(zoo, tmp_path / "out", only=names, on=Resources(device="cpu"), plugins=(), log=said.append)
    assert not said and {info.status for info in infos} == {"finished"}
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    questions, here = [], []
    for run in StudyRecords(tmp_path / "out").runs():
        assert len(run.metrics()) == 3
        assert {record.subset for record in run.evals()} == {"prose", "code"}
        leaks = run.info().leak_test
        assert (leaks["leaks"], leaks["untested"]) == ("", []) and leaks["moved"] < 1e-3 and leaks["shapes"], run.path
        stored = StoredModel(weights=latest(run.resume), plugins={})
        options = {"device": "cpu", "bf16": False, "threads": 1, "draws": draws_of(tokens.device)}
        questions.append(Question(model=stored, batches=[(tokens, tokens)], **options))
        here.append(load_unaveraged(stored.weights).token_losses(tokens, tokens).double())
    with FreshProcess() as process:
        process.ask(questions, seconds=300.0)
        there = process.answers()
    assert all(torch.equal(one, other) for one, (other,) in zip(here, there, strict=True))

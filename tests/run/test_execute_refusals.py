"""What running a study refuses: other studies, plugins, texts, precisions and sizes than the directory's own."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from basecap.data.sources import split_of
from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import BasecapError, ConfigError, DataError
from basecap.mixers import ARCHITECTURES
from basecap.plugins import load_plugin
from basecap.records import Machine, StudyRecords
from basecap.run.continue_text import Continued, continue_text
from basecap.study.config import load_study
from tests.data.plugin_source import load_anew
from tests.records.made_up import change
from tests.run._execute import PLUGIN, STEADY, VERSES, as_if_loaded_now, run


def test_another_study_in_the_directory_is_refused(study_file, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    with pytest.raises(ConfigError, match="another study"):
        run(study_file, tmp_path / "out", settings=("train.lr=1e-4",))


@pytest.fixture
def study(study: dict) -> dict:
    """Return a study of two steps."""
    study["train"] |= {"tokens": 512, "eval_every": 512}
    return study


def test_two_commands_share_the_runs_of_a_study(study_file, tmp_path, monkeypatch):
    out, infos = tmp_path / "out", []
    monkeypatch.setattr("basecap.run.shared_work.PAUSE", 0.05)
    command = threading.Thread(target=lambda: infos.extend(run(study_file, out, settings=("seeds=[0,1]",))))
    records = StudyRecords(out)
    own, others = records.run("transformer++", 0), [records.run("window 4", seed) for seed in (0, 1)]
    with records.claimed(own) as mine:
        command.start()
        while not all(other.finished for other in others):
            assert command.is_alive()
            time.sleep(0.05)
        assert mine and own.info() is None
    command.join(120)
    done = [(info.name, info.seed) for info in infos if info.finished]
    assert done == [(name, seed) for seed in (0, 1) for name in ("transformer++", "window 4")]


def test_a_run_in_training_is_not_continued_to_more_tokens(study_file, tmp_path):
    out, settings = tmp_path / "out", ("train.schedule=constant", "train.warmup=1")
    run(study_file, out, settings=(*settings, "train.tokens=512"), only=("transformer++",))
    records = StudyRecords(out)
    with records.claimed(records.run("transformer++", 0)), pytest.raises(ConfigError, match="another command trains"):
        run(study_file, out, settings=(*settings, "train.tokens=768"), only=("transformer++",))


def test_another_version_of_a_plugin_is_refused(study, tmp_path, monkeypatch):
    plugin, path = tmp_path / "steady.py", tmp_path / "tiny.yaml"
    plugin.write_text(STEADY)
    load_plugin(plugin)
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "steady"]}))
    infos = run(path, tmp_path / "out", plugins=(plugin,))
    assert run(path, tmp_path / "out", plugins=(plugin,)) == infos
    plugin.write_text(STEADY + "# changed")  # the loaded code is what trains
    (added,) = run(path, tmp_path / "out", only=("steady",), plugins=(plugin,), settings=("seeds=[1]",))[1:]
    assert added.plugins == infos[1].plugins
    as_if_loaded_now(plugin, monkeypatch)
    with pytest.raises(
        ConfigError,
        match=r"steady-s0 was trained with another version of steady\.py, or of .*; restore that one with",
    ):
        run(path, tmp_path / "out", plugins=(plugin,))
    with pytest.raises(ConfigError, match=r"another version of steady\.py"):
        continue_text(
            tmp_path / "out" / "runs" / "steady-s0", ["the"], 1, temperature=0, top_k=None, seed=0, device="cpu"
        )
    assert run(path, tmp_path / "out", only=("transformer++",), plugins=(plugin,)) == infos[:1]
    ours = [ARCHITECTURES.built_in(name) for name in ("steady", "steady pair", "transformer++", "based")]
    assert ours == [False, False, True, True]


def test_a_run_is_tied_to_its_own_plugin_alone(study, tmp_path, monkeypatch):
    path, out, plugins = tmp_path / "tiny.yaml", tmp_path / "out", [tmp_path / "first.py", tmp_path / "second.py"]
    plugins[0].write_text(PLUGIN.replace('"breaks"', '"first"').replace("self.calls >= 3", "False"))
    plugins[1].write_text(
        "from basecap.mixers import mixer\nfrom basecap_plugin_first import Breaks\n\n"
        '@mixer("second", backbone="transformer++", paper="none", summary="built on the first")\n'
        "class Second(Breaks):\n    pass\n"
    )
    for plugin in plugins:
        load_plugin(plugin)
    path.write_text(yaml.safe_dump(study | {"architectures": ["first", "second"], "reference": "first"}))
    infos = run(path, out, plugins=plugins)
    assert [sorted(info.plugins.values()) for info in infos] == [["first.py"], ["first.py", "second.py"]]

    plugins[1].write_text(plugins[1].read_text() + "# changed")
    as_if_loaded_now(plugins[1], monkeypatch)
    assert run(path, out, only=("first",), plugins=plugins) == infos[:1]
    with pytest.raises(ConfigError, match=r"second-s0 was trained with another version of second\.py"):
        run(path, out, plugins=plugins)
    first = out / "runs" / "first-s0"
    change(first / "run.json", plugins={**infos[0].plugins, "0" * 64: "second.py"})  # as it used to be
    run(path, out, only=("first",), plugins=plugins)
    monkeypatch.delitem(sys.modules, "basecap_plugin_second")

    def text() -> list[Continued]:
        return continue_text(first, ["the"], 1, temperature=0, top_k=None, seed=0, device="cpu")

    assert text()[0].prompt == "the"
    monkeypatch.delitem(sys.modules, "basecap_plugin_first")
    monkeypatch.delitem(ARCHITECTURES._entries, "first")
    with pytest.raises(ConfigError, match=r"a plugin that is not given; add --plugin first\.py --plugin second\.py\."):
        text()


def test_other_text_from_a_changed_plugin_is_refused(study, tmp_path):
    plugin, path, out = tmp_path / "verses.py", tmp_path / "tiny.yaml", tmp_path / "out"
    plugin.write_text(VERSES)
    load_anew(plugin, "study-verses")
    data = {"source": "study-verses", "tokenizer": "bytes", "seq_len": 32, "train": ["a"], "ood": ["b"], "workers": 1}
    path.write_text(yaml.safe_dump(study | {"data": data}))
    infos = run(path, out, only=("transformer++",), plugins=(plugin,))
    assert StudyRecords(out).environment()["plugins"] == {"source": {"study-verses": "verses.py"}}
    plugin.write_text(VERSES.replace("{number}", "{number} more"))
    load_anew(plugin, "study-verses")
    with pytest.raises(ConfigError, match="started with other data"):
        run(path, out, plugins=(plugin,))
    plugin.write_text(VERSES)
    load_anew(plugin, "study-verses")
    assert run(path, out, only=("transformer++",), plugins=(plugin,)) == infos


def test_no_study_is_trained_in_two_precisions_because_of_the_device(study_file, tmp_path):
    only, out = ("transformer++",), tmp_path / "out"
    (info,) = run(study_file, out, only=only)
    assert info.precision == "fp32" and info.device.startswith("CPU") and info.before == ()
    assert {"torch", "basecap"} <= info.packages.keys()
    elsewhere = {"device": "NVIDIA H200", "packages": {"torch": "2.8"}, "precision": "bf16", "threads": None}
    path = out / "runs" / "transformer++-s0" / "run.json"
    change(path, **elsewhere)
    assert run(study_file, out, only=only)[0].precision == "bf16"  # finished: nothing is trained
    mixed = r"-s0 was trained in bf16 on NVIDIA H200, and this device would train in fp32; set --device cuda, or"
    held = (out / "study.yaml").read_bytes()
    for more in ({"only": ("window 4",)}, {"settings": ("seeds=[1]",)}):
        with pytest.raises(ConfigError, match=mixed):
            run(study_file, out, **more)
        assert (out / "study.yaml").read_bytes() == held  # what is refused is not yet part of the study
    change(path, status="failed")
    with pytest.raises(ConfigError, match=mixed):
        run(study_file, out, only=only)
    change(path, precision="fp32")
    again = run(study_file, out, only=only)[0]
    assert again.before == (Machine(**elsewhere | {"precision": "fp32"}),) and again.device == info.device
    missing = dict.fromkeys(("device", "precision", "packages", "threads", "before"))  # as before there were any
    change(path, status="failed", **missing)
    assert run(study_file, out, only=only)[0].before == ()


def test_a_study_that_another_command_begins_meanwhile_is_joined(study_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    content = load_study(str(study_file), ("seeds=[7]", "train.tokens=512")).model_dump(mode="json")
    monkeypatch.setattr("basecap.run.start.refuse_leaks", lambda *given: StudyRecords(out).create(content) or {})
    (info,) = run(study_file, out, settings=("train.tokens=512",), only=("transformer++",))
    assert info.finished and info.seed == 0 and StudyRecords(out).study()["seeds"] == [7, 0]


def test_changed_text_is_refused_where_a_run_is_continued(study, study_file, tmp_path):
    out = tmp_path / "out"
    run(study_file, out, only=("transformer++",))
    shutil.rmtree(out / "data")
    (Path(study["data"]["path"]) / "prose" / "more.txt").write_text("another text " * 50)
    with pytest.raises(ConfigError, match="started with other data"):
        continue_text(out / "runs" / "transformer++-s0", ["the"], 1, temperature=0, top_k=None, seed=0, device="cpu")


def test_a_vocabulary_too_small_for_a_tokenizer_of_ones_own_leaves_no_study(study_file, tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().description)
    settings = ("model.vocab=256", f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    with pytest.raises(ConfigError, match="the model has 256 token ids but the tokenizer has 257"):
        run(study_file, tmp_path / "out", settings=settings)
    assert not (tmp_path / "out" / "study.yaml").exists()


@pytest.mark.parametrize(
    ("content", "wrong"), [(None, "does not exist; give the path of a"), ("{", "is not a valid tokenizer.json")]
)
def test_a_tokenizer_that_cannot_be_read_leaves_nothing(study_file, tmp_path, content, wrong):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BasecapError, match=wrong):
        run(study_file, tmp_path / "out", settings=(f"data.tokenizer={file}",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("evaluation", "missing"),
    [
        ({"domain-loss": {"split": "validation"}}, "domain 'code' has no validation documents"),
        ({"influence-entropy": {"split": "test", "length": 1000}}, "no test document of 'prose' has 1000 tokens"),
    ],
)
def test_what_an_evaluation_lacks_is_said_before_anything_is_trained(study, tmp_path, evaluation, missing):
    for text in (Path(study["data"]["path"]) / "code").iterdir():
        if split_of(text.read_text(), trained=False) == "validation":
            text.unlink()
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study | {"evals": [evaluation]}))
    with pytest.raises(DataError, match=missing):
        run(path, tmp_path / "out", settings=("data.seq_len=1024",) if "influence-entropy" in evaluation else ())
    assert not (tmp_path / "out" / "runs").exists() and not (tmp_path / "out" / "study.yaml").exists()


def test_text_that_is_missing_leaves_the_directory_free(study_file, study, tmp_path):
    with pytest.raises(DataError, match="not a directory"):
        run(study_file, tmp_path / "out", settings=(f"data.path={tmp_path / 'nowhere'}",))
    assert not (tmp_path / "out").exists()
    assert run(study_file, tmp_path / "out", only=("transformer++",))[0].status == "finished"


def test_other_text_under_the_same_study_is_refused(study_file, study, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    environment = tmp_path / "out" / "environment.json"
    content = json.loads(environment.read_text())
    environment.write_text(json.dumps({**content, "data": "0123"}))
    with pytest.raises(ConfigError, match="other data"):
        run(study_file, tmp_path / "out")


def test_sizes_are_refused_before_anything_is_written(study_file, tmp_path):
    with pytest.raises(ConfigError, match="window 4"):
        run(
            study_file,
            tmp_path / "out",
            settings=("architectures=[transformer++, {name: window 4, use: transformer++, mixer: {heads: 3}}]",),
        )
    assert not (tmp_path / "out").exists()

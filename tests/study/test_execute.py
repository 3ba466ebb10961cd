"""Running a study: complete records, resume, failures that stay where they are."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import yaml

from basecap.data.sources._contract import split_of
from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError, DataError
from basecap.mixers import ARCHITECTURES
from basecap.records import StudyRecords
from basecap.registry import load_plugin
from basecap.study.config import StudyConfig, load_study, select
from basecap.study.continuation import continuation
from basecap.study.execute import Execution, data_of, execute, places, side_by_side
from basecap.study.plan import plan_runs
from tests.data.test_preparation import load_anew
from tests.study.conftest import write_text

PLUGIN = """
import torch
from basecap.mixers import Cache, Mixer, mixer

@mixer("breaks", backbone="transformer++", paper="none", summary="gives NaN in its third call")
class Breaks(Mixer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.calls = 0

    def forward(self, x, segments=None):
        self.calls += 1
        return x * torch.nan if self.calls >= 3 else x

    def init_cache(self, batch, max_length):
        return Cache(tensors={})

    def step(self, x, cache):
        return x

    def flops(self, length):
        return 0.0

    def state_bytes(self, length):
        return 0
"""


STEADY = (
    PLUGIN.replace('"breaks"', '"steady"').replace("self.calls >= 3", "False")
    + """
from basecap.mixers._contract import LayerChoice, hybrid
from basecap.mixers.attention import Attention

hybrid("steady pair", layers=(LayerChoice(mixer=Attention),), backbone="gpt", paper="none", summary="of ours")
"""
)

ALONE = (
    PLUGIN.replace('"breaks"', '"alone"').replace(
        "return x * torch.nan if self.calls >= 3 else x", "return fail(self.calls, x)"
    )
    + """
import torch.distributed as dist
from basecap.evals._contract import Evaluation, Outcome, evaluation

def fail(calls, x):
    if calls == 3 and dist.get_rank() == 1:
        raise MemoryError("no room in process 1")
    return x

@evaluation("fails-once", unit="none", better="lower")
class FailsOnce(Evaluation):
    fresh = True

    def run(self, model, context):
        if FailsOnce.fresh:
            FailsOnce.fresh = False
            raise RuntimeError("this evaluation cannot")
        return Outcome(measurements=[])
"""
)

VERSES = """
from basecap.data.sources import Document, Part, Source, source

@source("study-verses")
class Verses(Source):
    def parts(self):
        return [Part("all")]

    def read(self, part):
        for domain in ("a", "b"):
            for split in ("train", "validation", "test"):
                for number in range(20):
                    yield Document(domain, split, f"{domain} {split} {number} " * 10)
"""


def run(path: Path, out: Path, settings: tuple[str, ...] = (), only: tuple[str, ...] = (), plugins=()) -> list[dict]:
    study = load_study(str(path), settings)
    said: list[str] = []
    infos = execute(study, out, only=select(study, only), device="cpu", plugins=plugins, say=said.append)
    assert len(said) == sum(info["status"] == "failed" for info in infos)
    return infos


def losses(out: Path) -> dict[str, list[float]]:
    return {found.info()["name"]: [row["train_loss"] for row in found.metrics()] for found in StudyRecords(out).runs()}


def test_a_study_leaves_complete_records(study_file, tmp_path):
    infos = run(study_file, tmp_path / "out")
    assert [info["status"] for info in infos] == ["finished", "finished"]
    records = StudyRecords(tmp_path / "out")
    assert StudyConfig.model_validate(records.study()).name == "tiny"
    assert records.environment()["data"] and records.environment()["packages"]["torch"]
    assert list(records.declarations()) == ["domain-loss"]
    for found in records.runs():
        assert found.info()["ops"]["linear_cross_entropy"].startswith("in plain PyTorch: ")
        assert found.evaluated_steps("domain-loss") == [2, 4, 6, 8, 10]
        last = {(r.subset, r.metric): r for r in found.evals() if r.step == 10}
        assert {subset for subset, _ in last} == {"prose", "notes", "code"}
        for domain, losses in found.documents("domain-loss", 10).items():
            record = last[domain, "loss"]
            assert record.value == pytest.approx(losses.nats.sum() / losses.tokens.sum())
            assert record.n == losses.tokens.sum() and record.stderr > 0


def test_a_text_of_a_few_lines_trains(study, tmp_path):
    study["data"]["path"] = str(write_text(tmp_path / "short", documents=30, words=10))
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(study))
    assert {info["status"] for info in run(path, tmp_path / "out")} == {"finished"}


def test_running_again_does_nothing_and_only_adds(study_file, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    assert set(losses(tmp_path / "out")) == {"transformer++"}
    first = losses(tmp_path / "out")["transformer++"]
    run(study_file, tmp_path / "out")
    assert set(losses(tmp_path / "out")) == {"transformer++", "window 4"}
    assert losses(tmp_path / "out")["transformer++"] == first


def test_processes_side_by_side_give_the_same_losses(study_file, tmp_path):
    run(study_file, tmp_path / "one")
    study = load_study(str(study_file))
    StudyRecords(tmp_path / "two").create(study.model_dump(mode="json"))
    execution = Execution(study=study, out=tmp_path / "two", device="cpu")
    runs = plan_runs(study, data_of(study, tmp_path / "two").tokenizer.vocab_size)
    infos = side_by_side(execution, runs, ["cpu", "cpu"])
    assert [info["status"] for info in infos] == ["finished", "finished"]
    for name, expected in losses(tmp_path / "one").items():
        assert losses(tmp_path / "two")[name] == pytest.approx(expected, rel=1e-5)  # threads may add in another order


def test_what_is_finished_takes_no_place_from_what_is_not(study_file, tmp_path, monkeypatch):
    out, study = tmp_path / "out", load_study(str(study_file), ("train.seeds=[0,1,2]",))
    run(study_file, out)
    taken = []

    class Worker:
        def __init__(self, execution, pools):
            self.device = execution.device

        def take(self, spec):
            taken.append((spec.name, spec.seed, self.device))
            future = Future()
            future.set_result({"name": spec.name, "seed": spec.seed})
            return future

    monkeypatch.setattr("basecap.study.execute._Worker", Worker)
    runs = [spec for spec in plan_runs(study, byte_tokenizer().vocab_size) if spec.seed < 2 or spec.name == "window 4"]
    execution = Execution(study=study, out=out, device="cpu")
    infos = side_by_side(execution, runs, ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1", "cuda:2"])
    assert [(info["name"], info["seed"]) for info in infos] == [(spec.name, spec.seed) for spec in runs]
    assert len(taken) == 3 and {device for _, _, device in taken} == {"cuda:0", "cuda:1", "cuda:2"}


@pytest.mark.parametrize(
    ("chosen", "asked", "world", "per_gpu", "expected"),
    [
        ("cpu", None, 1, 1, ["cpu"]),
        ("cuda:0", None, 1, 1, ["cuda:0", "cuda:1"]),
        ("cuda:0", None, 1, 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", "cuda:1", 1, 2, ["cuda:1", "cuda:1"]),
        ("cuda:1", None, 2, 1, ["cuda:1"]),
    ],
)
def test_runs_go_to_every_gpu(monkeypatch, chosen, asked, world, per_gpu, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert places(torch.device(chosen), asked, world, per_gpu) == expected


@pytest.mark.parametrize(("chosen", "world", "where"), [("cpu", 1, "on cpu"), ("cuda", 2, "under torchrun")])
def test_only_a_gpu_is_shared(chosen, world, where):
    with pytest.raises(ConfigError, match=f"{where} leave out --per-gpu"):
        places(torch.device(chosen), None, world, 2)


def test_a_killed_process_costs_its_own_run_alone(study, tmp_path):
    plugin, out = tmp_path / "killed.py", tmp_path / "out"
    plugin.write_text(PLUGIN.replace('"breaks"', '"killed"').replace("x * torch.nan", "os._exit(9)"))
    plugin.write_text("import os\n" + plugin.read_text())
    load_plugin(plugin)
    made = StudyConfig.model_validate(study | {"architectures": ["transformer++", "killed"]})
    StudyRecords(out).create(made.model_dump(mode="json"))
    execution = Execution(study=made, out=out, device="cpu", plugins=(plugin,))
    said: list[str] = []
    runs = plan_runs(made, data_of(made, out).tokenizer.vocab_size)[::-1]
    infos = side_by_side(execution, runs, ["cpu"], said.append)
    assert [(info["name"], info["status"]) for info in infos] == [("killed", "failed"), ("transformer++", "finished")]
    recorded = [found.info() for found in StudyRecords(out).runs()]
    assert [info["status"] for info in recorded] == ["failed", "finished"]
    assert said == [f"killed (seed 0) failed: {recorded[0]['message']}"] and "was killed, perhaps" in said[0]
    assert len(losses(out)["killed"]) == 2


def test_another_study_in_the_directory_is_refused(study_file, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    with pytest.raises(ConfigError, match="another study"):
        run(study_file, tmp_path / "out", settings=("train.lr=1e-4",))


def test_a_directory_takes_more_seeds_and_architectures(study, tmp_path):
    path, out = tmp_path / "tiny.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++"]}))
    run(path, out)
    first = StudyRecords(out).run("transformer++", 0).metrics()
    path.write_text(yaml.safe_dump(study))
    infos = run(path, out, settings=("train.seeds=[1]",))
    assert [(info["name"], info["seed"]) for info in infos] == [("transformer++", 1), ("window 4", 1)]
    infos = run(path, out, settings=("train.seeds=[1,0]",), only=("window 4",))
    assert len(infos) == 4 and StudyRecords(out).run("transformer++", 0).metrics() == first
    assert StudyRecords(out).study()["train"]["seeds"] == [0, 1]
    assert {row["name"] for row in StudyRecords(out).study()["architectures"]} == {"transformer++", "window 4"}


def test_a_study_that_is_running_is_refused_at_once(study_file, tmp_path):
    with StudyRecords(tmp_path / "out").locked(), pytest.raises(ConfigError, match="another process is running this"):
        run(study_file, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_another_version_of_a_plugin_is_refused(study, tmp_path):
    plugin, path = tmp_path / "steady.py", tmp_path / "tiny.yaml"
    plugin.write_text(STEADY)
    load_plugin(plugin)
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "steady"]}))
    infos = run(path, tmp_path / "out", plugins=(plugin,))
    assert run(path, tmp_path / "out", plugins=(plugin,)) == infos
    plugin.write_text(STEADY + "# changed")
    with pytest.raises(
        ConfigError, match=r"steady-s0 was trained with another version of steady\.py; restore that one"
    ):
        run(path, tmp_path / "out", plugins=(plugin,))
    with pytest.raises(ConfigError, match=r"another version of steady\.py"):
        continuation(tmp_path / "out" / "runs" / "steady-s0", "the", 1, temperature=0, top_k=None, seed=0, device="cpu")
    assert run(path, tmp_path / "out", only=("transformer++",), plugins=(plugin,)) == infos[:1]
    ours = [ARCHITECTURES.built_in(name) for name in ("steady", "steady pair", "transformer++", "based")]
    assert ours == [False, False, True, True]


def test_a_run_is_tied_to_its_own_plugin_alone(study, tmp_path, monkeypatch):
    path, out, plugins = tmp_path / "tiny.yaml", tmp_path / "out", [tmp_path / "first.py", tmp_path / "second.py"]
    study["train"] |= {"tokens": 512, "eval_every": 512}
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
    assert [sorted(info["plugins"].values()) for info in infos] == [["first.py"], ["first.py", "second.py"]]

    plugins[1].write_text(plugins[1].read_text() + "# changed")
    assert run(path, out, only=("first",), plugins=plugins) == infos[:1]
    with pytest.raises(ConfigError, match=r"second-s0 was trained with another version of second\.py"):
        run(path, out, plugins=plugins)
    first = out / "runs" / "first-s0"
    change(first / "run.json", plugins={**infos[0]["plugins"], "0" * 64: "second.py"})  # as it used to be
    run(path, out, only=("first",), plugins=plugins)
    monkeypatch.delitem(sys.modules, "basecap_plugin_second")

    def text() -> str:
        return continuation(first, "the", 1, temperature=0, top_k=None, seed=0, device="cpu")

    assert text().startswith("the")
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
    plugin.write_text(VERSES.replace("{number}", "{number} more"))
    load_anew(plugin, "study-verses")
    with pytest.raises(ConfigError, match="begun with other data"):
        run(path, out, plugins=(plugin,))
    plugin.write_text(VERSES)
    load_anew(plugin, "study-verses")
    assert run(path, out, only=("transformer++",), plugins=(plugin,)) == infos


def change(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_an_unfinished_run_is_not_continued_in_another_precision(study_file, tmp_path):
    only, out = ("transformer++",), tmp_path / "out"
    (info,) = run(study_file, out, only=only)
    assert info["precision"] == "fp32" and info["device"].startswith("CPU") and info["before"] == []
    assert {"torch", "basecap"} <= info["packages"].keys()
    elsewhere = {"device": "NVIDIA H200", "packages": {"torch": "2.8"}, "precision": "bf16"}
    path = out / "runs" / "transformer++-s0" / "run.json"
    change(path, **elsewhere)
    assert run(study_file, out, only=only)[0]["precision"] == "bf16"  # finished: nothing goes on
    change(path, status="failed")
    mixed = r"-s0 was trained in bf16 on NVIDIA H200, and this device would train in fp32; set --device cuda, or"
    with pytest.raises(ConfigError, match=mixed):
        run(study_file, out, only=only)
    change(path, precision="fp32")
    again = run(study_file, out, only=only)[0]
    assert again["before"] == [{**elsewhere, "precision": "fp32"}] and again["device"] == info["device"]
    change(path, status="failed", device=None, precision=None, packages=None, before=None)  # as before there were any
    assert run(study_file, out, only=only)[0]["before"] == []


def test_no_study_is_trained_in_two_precisions_because_of_the_device(study_file, tmp_path):
    out = tmp_path / "out"
    run(study_file, out, only=("transformer++",))
    change(out / "runs" / "transformer++-s0" / "run.json", device="NVIDIA H200", precision="bf16")
    held = (out / "study.yaml").read_bytes()
    for more in ({"only": ("window 4",)}, {"settings": ("train.seeds=[1]",)}):
        with pytest.raises(ConfigError, match="trained in bf16 on NVIDIA H200, and this device would train in fp32"):
            run(study_file, out, **more)
        assert (out / "study.yaml").read_bytes() == held  # what is refused is not yet part of the study
    change(out / "runs" / "transformer++-s0" / "run.json", status="running")
    shutil.rmtree(out / "runs" / "transformer++-s0" / "checkpoints")  # so it begins again
    assert {info["precision"] for info in run(study_file, out)} == {"fp32"}


def test_the_recorded_machine_stays_once_something_has_run(study_file, tmp_path):
    only, path = ("transformer++",), tmp_path / "out" / "environment.json"
    run(study_file, tmp_path / "out", only=only)
    change(path, device="NVIDIA H200")
    run(study_file, tmp_path / "out", only=only)
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"
    shutil.rmtree(tmp_path / "out" / "runs")
    run(study_file, tmp_path / "out", only=only)
    assert json.loads(path.read_text())["device"].startswith("CPU")


def test_changed_text_is_refused_where_a_run_is_continued(study, study_file, tmp_path):
    out = tmp_path / "out"
    run(study_file, out, only=("transformer++",))
    shutil.rmtree(out / "data")
    (Path(study["data"]["path"]) / "prose" / "more.txt").write_text("another text " * 50)
    with pytest.raises(ConfigError, match="begun with other data"):
        continuation(out / "runs" / "transformer++-s0", "the", 1, temperature=0, top_k=None, seed=0, device="cpu")


def test_a_vocabulary_too_small_for_a_tokenizer_of_ones_own_leaves_no_study(study_file, tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().description)
    settings = ("model.vocab=256", f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    with pytest.raises(ConfigError, match="the model knows 256 tokens but the data has 257"):
        run(study_file, tmp_path / "out", settings=settings)
    assert not (tmp_path / "out" / "study.yaml").exists()


@pytest.mark.parametrize(
    ("evaluation", "missing"),
    [
        ({"domain-loss": {"split": "validation"}}, "domain 'code' has no validation documents"),
        ({"influence-entropy": {"split": "test", "length": 1000}}, "no test document of 'prose' has 1000 tokens"),
    ],
)
def test_what_an_evaluation_lacks_is_said_before_anything_is_trained(study, tmp_path, evaluation, missing):
    for text in (Path(study["data"]["path"]) / "code").iterdir():
        if split_of(text.read_text()) == "validation":
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
    assert run(study_file, tmp_path / "out", only=("transformer++",))[0]["status"] == "finished"


def test_other_text_under_the_same_study_is_refused(study_file, study, tmp_path):
    run(study_file, tmp_path / "out", only=("transformer++",))
    environment = tmp_path / "out" / "environment.json"
    content = json.loads(environment.read_text())
    environment.write_text(json.dumps({**content, "data": "0123"}))
    with pytest.raises(ConfigError, match="other data"):
        run(study_file, tmp_path / "out")


def test_a_run_that_breaks_does_not_stop_the_others(study, tmp_path):
    plugin = tmp_path / "breaks.py"
    plugin.write_text(PLUGIN)
    load_plugin(plugin)
    study["architectures"].insert(1, "breaks")
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    infos = run(path, tmp_path / "out", plugins=(plugin,))
    assert [info["status"] for info in infos] == ["finished", "failed", "finished"]
    assert "step 3" in infos[1]["message"] and "blocks.0.mixer" in infos[1]["message"]


def test_sizes_are_refused_before_anything_is_written(study_file, tmp_path):
    with pytest.raises(ConfigError, match="window 4"):
        run(
            study_file,
            tmp_path / "out",
            settings=("architectures=[transformer++, {name: window 4, use: transformer++, mixer: {heads: 3}}]",),
        )
    assert not (tmp_path / "out").exists()


def test_kill_and_resume_gives_the_same_curve_to_the_bit(study, tmp_path):
    study["train"] |= {"tokens": 40_960, "eval_every": 2560}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "basecap.cli", "run", str(path), "--device", "cpu", "--only", "transformer++"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment, stderr=subprocess.PIPE)
    metrics = tmp_path / "killed" / "runs" / "transformer++-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 45):
        assert killed.poll() is None and time.monotonic() < deadline, killed.stderr.read()
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert 45 <= len(metrics.read_bytes().splitlines()) < 160
    subprocess.run([*command, "--out", str(tmp_path / "killed")], env=environment, check=True, capture_output=True)
    run(path, tmp_path / "straight", only=("transformer++",))
    assert len(losses(tmp_path / "straight")["transformer++"]) == 160
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    one, two = (StudyRecords(tmp_path / out).runs()[0].evals() for out in ("killed", "straight"))
    assert one == two


def in_two_processes(*arguments: object, timeout: int) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "basecap.cli", "run", "--device", "cpu", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def test_an_error_in_one_of_two_processes_leaves_no_other_waiting(study, tmp_path):
    plugin, path = tmp_path / "alone.py", tmp_path / "tiny.yaml"
    plugin.write_text(ALONE)
    names = [*study["architectures"], "alone"]
    path.write_text(yaml.safe_dump(study | {"architectures": names, "evals": ["domain-loss", "fails-once"]}))
    done = in_two_processes(path, "--out", tmp_path / "out", "--plugin", plugin, timeout=60)
    assert done.returncode == 1, done.stderr[-3000:]
    infos = {info["name"]: info for info in (found.info() for found in StudyRecords(tmp_path / "out").runs())}
    assert {name: info["status"] for name, info in infos.items()} == {
        "transformer++": "failed",  # the leader's evaluation: both processes know and go on
        "window 4": "finished",
        "alone": "failed",  # within a step: the other is ended
    }
    assert infos["transformer++"]["message"] == "RuntimeError: this evaluation cannot"
    assert "in run" in infos["transformer++"]["traceback"]
    assert infos["alone"]["message"] == "MemoryError: no room in process 1"
    assert done.stderr.count("transformer++ (seed 0) failed: RuntimeError: this evaluation cannot") == 1
    assert done.stderr.count("alone (seed 0) failed in process 1, which ends them all (--only") == 1


def test_two_processes_run_a_study_and_one_reports(study_file, tmp_path):
    run(study_file, tmp_path / "one")
    done = in_two_processes(study_file, "--out", tmp_path / "two", timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report.html") == 1
    for name, expected in losses(tmp_path / "one").items():
        assert losses(tmp_path / "two")[name] == pytest.approx(expected, rel=1e-4)

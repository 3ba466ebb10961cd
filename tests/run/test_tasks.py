"""Studies that train on tasks: planned, run, resumed, grown, ended early; what does not work is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from basecap.analysis import TaskResults, analyse
from basecap.cli.options import seed_limit
from basecap.data.task_data import TaskData
from basecap.errors import ConfigError, DataError, Interrupted
from basecap.plan.checks import check
from basecap.plan.estimate import estimate, remarks
from basecap.plan.runs import plan_runs
from basecap.records import RunRecords, StudyRecords
from basecap.records.measured import Record
from basecap.run.audited import audit_run
from basecap.run.executors import Resources
from basecap.run.stored_weights import evaluate_directory
from basecap.run.training_job import VALIDATION, _good_enough
from basecap.study.config import StudyConfig, load_study
from basecap.study.merge import merge_studies
from basecap.train.checkpoint import stored, stored_config
from tests.run._execute import run

CELLS = [{"length": 8, "pairs": 1}, {"length": 16, "pairs": 2}]


@pytest.fixture
def content() -> dict:
    """Return the content of a study of two training tasks that runs in a second."""
    return {
        "name": "tiny recall",
        "task": {
            "train": ["mqar", "mqar-last"],
            "options": {"vocab": 16},
            "cells": CELLS,
            "examples": 40,
            "held_out": 10,
        },
        "model": {"hidden": 16, "layers": 1},
        "train": {"epochs": 2, "batch": 4, "lr": 1e-2, "warmup": 1, "eval_every": 640},
        "architectures": ["transformer++"],
    }


def write(content: dict, path: Path) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def outcome(out: Path) -> list:
    """Return what every run left, times apart."""
    return [
        (found.info().name, found.evals(), [(row["step"], row["train_loss"], row["lr"]) for row in found.metrics()])
        for found in StudyRecords(out).runs()
    ]


def test_a_run_per_architecture_task_and_seed(content):
    runs = check(StudyConfig.model_validate(content | {"seeds": [0, 1]})).runs
    assert [run.label for run in runs[:2]] == ["transformer++ on mqar (seed 0)", "transformer++ on mqar-last (seed 0)"]
    assert [(run.architecture, run.task) for run in runs] == [
        ("transformer++", name) for name in ("mqar", "mqar-last")
    ] * 2
    assert {(run.length, run.model.max_length, run.model.vocab) for run in runs} == {(16, 16, 36)}
    # Forty examples of 16 tokens fill ten steps, of 8 tokens five.
    assert {(run.train.tokens, run.timetable.steps) for run in runs} == {(2 * 15 * 4 * 16, 30)}
    assert len({run.hash for run in runs} | {replace(runs[0], examples="other").hash}) == 5
    content["task"]["train"] = ["mqar"]
    (alone,) = plan_runs(StudyConfig.model_validate(content), 36)
    assert alone.name == "transformer++" and alone.hash not in {run.hash for run in runs}


def test_an_architecture_trains_on_its_own_tasks(content, tmp_path):
    content["architectures"] = ["transformer++", {"use": "mamba-1", "tasks": ["mqar-last"]}]
    out = tmp_path / "out"
    infos = run(write(content, tmp_path / "study.yaml"), out)
    assert [info.name for info in infos] == [
        "transformer++ on mqar",
        "transformer++ on mqar-last",
        "mamba-1 on mqar-last",
    ]
    (found,) = analyse([out])
    assert isinstance(found, TaskResults) and found.waiting == []
    assert [(row.architecture, row.train) for row in found.trained if row.architecture == "mamba-1"] == [
        ("mamba-1", "mqar-last")
    ]
    layer, _ = audit_run(next(run.path for run in StudyRecords(out).runs() if run.info().use == "mamba-1"))
    assert layer.layer == "layer 0, Mamba1" and layer.relation > 0 and layer.selection > layer.null
    content["architectures"][1]["tasks"] = ["mqar-lats"]
    with pytest.raises(
        ConfigError, match=r"architecture 'mamba-1': task 'mqar-lats' is not in task.train: did you mean"
    ):
        load_study(str(write(content, tmp_path / "study.yaml")))
    with pytest.raises(ConfigError, match="architecture 'mamba-1': tasks needs a study of tasks; remove it"):
        load_study("quickstart", ["architectures=[transformer++, {use: mamba-1, tasks: [mqar]}]"])


def test_a_plan_counts_the_flops_of_each_length(content, monkeypatch):
    monkeypatch.setattr("basecap.system.environment.choose_device", lambda name: torch.device("cpu"))
    study = StudyConfig.model_validate(content | {"train": content["train"] | {"cuda_graphs": False}})
    planned = check(study)
    rows = estimate(planned, Path("nowhere"))
    content["task"]["cells"] = CELLS[1:]
    more = StudyConfig.model_validate(content | {"train": content["train"] | {"epochs": 3}})
    graphed = check(more)
    longer = estimate(graphed, Path("x"))
    assert rows[0]["tokens (M)"] == longer[0]["tokens (M)"]
    assert 0.9 * longer[0]["PFLOP"] < rows[0]["PFLOP"] < longer[0]["PFLOP"]
    assert not any("domain" in line or "Warning" in line for line in remarks(planned, rows, Path("nowhere")))
    # 0.4 * 1 TFLOP/s * 86,400 s
    work = {"PFLOP": 24.56, "evaluation PFLOP": 10.0, "hours if all reach 40%": 12.0, "hours if all reach 15%": 32.0}
    day = [row | work for row in rows]
    for threads, order in ((1, " one after the other"), (3, ", 3 side by side (--per-device 3)")):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        assert remarks(planned, [*day, *day], Path("nowhere"))[0] == (
            f"All 4 runs: 2 days to 5 days{order}, 29 % of it for evaluations, if all reach 15 % to 40 % of this "
            "machine's matrix rate, now 2 TFLOP/s; at the same shares of 1,000 TFLOP/s, 5 min 46 s to 15 min 22 s."
        )
    assert remarks(planned, [*day, *day], Path("nowhere"), gpus=2)[1] == (
        "On 2 such GPUs, one run on each at a time: 2 min 53 s to 7 min 41 s; the longest run takes 1 min 26 s to "
        "3 min 50 s, also on more GPUs unless torchrun gives it several."
    )
    one, large = ({**rows[0], "blocks": 8, "steps": 10_000, "PFLOP": work} for work in (1.0, 100.0))
    assert "the steps of 1 of the runs are too small" in (said := remarks(planned, [one, large], Path("nowhere"))[1])
    assert "they take 40 s to 3 min 28 s, and longer" in said  # 0.5 and 2.6 ms for each of 80,000
    assert said.endswith("; train.cuda_graphs=auto makes them faster.")
    assert "they take 9 s to 34 s, and longer" in remarks(graphed, [one, large], Path("nowhere"))[1]  # 0.11 and 0.43
    assert remarks(planned, [large], Path("nowhere"))[1].startswith("Left out")


def test_a_study_is_run_resumed_to_the_bit_and_tested_on_more(content, tmp_path, monkeypatch):
    path = write(content, tmp_path / "study.yaml")
    assert [info.status for info in run(path, tmp_path / "straight")] == ["finished"] * 2
    expected = outcome(tmp_path / "straight")
    make, calls = TaskData.batch, []

    def interrupted(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) in (12, 50):
            raise Interrupted(15)
        return make(self, *arguments, **options)

    monkeypatch.setattr(TaskData, "batch", interrupted)
    for _ in range(2):
        with pytest.raises(Interrupted):
            run(path, tmp_path / "resumed")
    run(path, tmp_path / "resumed")
    assert outcome(tmp_path / "resumed") == expected
    info = StudyRecords(tmp_path / "resumed").runs()[1].info()
    assert (info.name, info.architecture, info.task) == (
        "transformer++ on mqar-last",
        "transformer++",
        "mqar-last",
    )

    steps, subsets = {record.step for record in expected[0][1]}, {record.subset for record in expected[0][1]}
    assert (steps, subsets) == ({10, 20, 30}, {"mqar", "mqar-last"})
    run(path, tmp_path / "resumed", ("task.test=[mqar-shuffle]",))
    found = StudyRecords(tmp_path / "resumed").runs()[0].evals()
    assert {record.step for record in found if record.subset == "mqar-shuffle"} == {20, 30}
    assert [record for record in found if record.subset != "mqar-shuffle"][-1] in expected[0][1]
    assert (
        evaluate_directory(
            tmp_path / "resumed", add=(), at="end", only=(), on=Resources(device="cpu"), plugins=(), log=print
        )
        == 0
    )


def test_a_study_grows_by_tasks_that_its_models_can_read(content):
    def study(**changes) -> StudyConfig:
        return StudyConfig.model_validate(content | {"task": content["task"] | {"cells": None} | changes})

    held = study(train=["mqar"])
    assert merge_studies(held, study(train=["mqar"], test=["mqar-k2v2"]), Path("here")).task.test == (
        "mqar",
        "mqar-k2v2",
    )
    with pytest.raises(ConfigError, match=r"here holds another study \(task.train is"):
        merge_studies(held, study(), Path("here"))  # names of runs would change
    assert merge_studies(study(), study(train=["mqar-shuffle"]), Path("here")).task.train == (
        "mqar",
        "mqar-last",
        "mqar-shuffle",
    )
    with pytest.raises(ConfigError, match="task 'mad-compression' is decoded from the last position, but 'mqar' is"):
        merge_studies(
            study(options={"vocab": 300}), study(train=["mad-compression"], options={"vocab": 300}), Path("here")
        )
    with pytest.raises(ConfigError, match="here has models of 512 tokens and a vocabulary of 36, too few for the new"):
        merge_studies(held, study(train=["mqar"], test=["copying"]), Path("here"))


def test_a_run_ends_where_it_is_good_enough_and_resumes_to_the_same_end(content, tmp_path):
    content["train"] |= {"stop_at": 1e-9, "epochs": 20, "lr": 3e-2}
    content["task"] |= {"train": ["zoology-mqar"], "test": ["mqar"]}
    path = write(content, tmp_path / "study.yaml")
    (info,) = run(path, tmp_path / "out")
    (records,) = StudyRecords(tmp_path / "out").runs()
    assert info.status == "finished" and 0 < info.stopped < 300 and info.stopped == records.metrics()[-1]["step"]
    assert [*stored(records.weights)] == [info.stopped]
    expected = outcome(tmp_path / "out")
    (records.path / "run.json").write_text(json.dumps({"schema": 1, **info.row(), "status": "running"}))
    (again,) = run(path, tmp_path / "out")
    assert run(path, tmp_path / "out", ("task.test=[zoology-mqar]",)) == [again]  # whose vocabulary alone is smaller
    found = {record.key: record for record in outcome(tmp_path / "out")[0][1]}
    assert again.stopped == info.stopped and len(found) == len(expected[0][1]) + 4
    assert all(found[record.key] == record for record in expected[0][1])
    assert (
        evaluate_directory(
            tmp_path / "out", add=(), at=None, only=(), on=Resources(device="cpu"), plugins=(), log=print
        )
        == 0
    )


def test_an_accuracy_of_exactly_stop_at_ends_a_run(content, tmp_path):
    (spec, _), records = plan_runs(StudyConfig.model_validate(content), 36), RunRecords(tmp_path)
    for place, value in enumerate((0.5, 1.0)):
        named = {"eval": "recall", "subset": "mqar", "metric": VALIDATION, "n": 4}
        records.append_evals([Record(step=10, tokens=640, **named, value=value, axis={"length": place})])
    for stop_at, ends in ((0.75, True), (0.76, False), (None, False)):
        train = spec.train.model_copy(update={"stop_at": stop_at})
        assert _good_enough(replace(spec, train=train), records, 10) == ends


def test_a_sequence_is_compressed_and_decoded_by_any_mixer(content, tmp_path):
    content["task"] |= {"train": ["mad-compression"], "options": {}, "cells": [{"length": 4, "vocab": 5}]}
    content["task"] |= {"examples": 9600, "held_out": 400}
    content["train"] |= {"epochs": 1, "batch": 32, "eval_every": 38_400}
    content["architectures"] = ["transformer++", "mamba-1"]
    infos = run(write(content, tmp_path / "study.yaml"), tmp_path / "out")
    assert [info.status for info in infos] == ["finished"] * 2
    # A guess is right in 0.25 of the cases, and the most frequent of the three tokens at all positions in 0.56.
    for records, least in zip(StudyRecords(tmp_path / "out").runs(), (0.6, 0.35), strict=True):
        assert [row.value for row in records.evals() if row.metric == "accuracy"][-1] > least
        assert stored_config(records.resume).readout == "last"
    with pytest.raises(ConfigError, match="'mad-compression' is decoded from the last position, but 'mqar' is"):
        run(tmp_path / "study.yaml", tmp_path / "out", ("task.test=[mad-compression, mqar]",))
    content["evals"] = ["recall", {"selectivity": {"task": "mqar", "options": {"vocab": 4}}}]
    with pytest.raises(DataError, match="selectivity: the answers to mad-compression are all decoded from the last"):
        run(write(content, tmp_path / "study.yaml"), tmp_path / "other")


def test_a_sweep_chooses_by_the_validation_loss_of_each_task(content, tmp_path):
    content["train"] |= {"lr": [1e-6, 1e-2]}
    infos = run(write(content, tmp_path / "study.yaml"), tmp_path / "out")
    assert {info.name: info.lr for info in infos} == {
        "transformer++ on mqar": 1e-2,
        "transformer++ on mqar-last": 1e-2,
    }
    sweeps = StudyRecords(tmp_path / "out").sweeps()
    assert [(sweep.split, sweep.losses[0] > sweep.losses[1]) for sweep in sweeps] == [("validation", True)] * 2


def test_a_sweep_ends_with_the_first_rate_that_is_good_enough(content, tmp_path):
    content["train"] |= {"lr": [1e-6, 3e-2, 1e-2], "stop_at": 1e-9, "epochs": 20}
    content["task"] |= {"train": ["zoology-mqar"], "test": ["zoology-mqar"]}
    path, out = write(content, tmp_path / "study.yaml"), tmp_path / "out"
    (info,) = run(path, out)
    (sweep,) = StudyRecords(out).sweeps()
    assert (sweep.rates, info.lr, info.stopped > 0) == ((1e-6, 3e-2), 3e-2, True)
    assert sweep.reached and not sweep.at_edge
    assert run(path, out) == [info]
    plain = check(StudyConfig.model_validate(content))
    assert any(
        "a sweep ends with the first learning rate that does" in line
        for line in remarks(plain, estimate(plain, out), out)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"source": "text", "train": ["a"]}}, "a study has a section data .* or task .*; remove one"),
        ({"task": None}, "a study has a section data .* or task .*; add one"),
        ({"train": {"epochs": 1, "tokens": 5}}, "both set the length of a run; remove one or set it to null"),
        ({"train": {"lr": 1}}, r"'train\.tokens' is missing; add it or train\.epochs"),
        ({"task": {"train": ["mqar"], "exampels": 3}}, r"unknown key 'task\.exampels': did you mean 'task\.examples'"),
        ({"evals": ["domain-loss"]}, "'domain-loss' measures on text, and this study trains on tasks"),
        ({"evals": ["position-loss"]}, "'position-loss' measures on text, and this study trains on tasks"),
        ({"model": {"hidden": 16, "vocab": 30}}, r"model\.vocab = 30 is less than the tasks' 36"),
        ({"evals": [{"recall": {"at": "end"}}], "train": {"epochs": 1, "stop_at": 0.5}}, r"train\.stop_at needs"),
        (
            {"architectures": ["pythia", "transformer"], "evals": ["recall", {"inference-speed": {"prompt": 60}}]},
            "architecture 'transformer': inference-speed: a sequence may have 92 tokens, and this model has parameters",
        ),
        *(
            (
                {"architectures": [name], "task": {"train": ["mqar"], "cells": CELLS[:1], "test_cells": CELLS}},
                f"'{re.escape(name)}' has parameters for each position, and 'mqar' trains only those of 8; leave out "
                "tests of 16 tokens",
            )
            for name in ("transformer", "transformer++ random qk")
        ),
    ],
)
def test_what_does_not_work_is_refused(content, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        check(load_study(str(write(content | changes, tmp_path / "study.yaml"))))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evals": ["domain-loss", "recall"]}, "'recall' measures on tasks, and this study trains on text"),
        ({"train": {"epochs": 2, "batch": 8}}, r"train\.epochs needs the examples of a task, not text"),
        ({"train": {"tokens": 9, "stop_at": 0.9}}, r"train\.stop_at needs the examples of a task, not text"),
    ],
)
def test_a_study_of_text_has_no_options_of_tasks(study, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        check(load_study(str(write(study | changes, tmp_path / "study.yaml"))))


def test_commands_of_text_refuse_a_study_of_tasks(content):
    study = StudyConfig.model_validate(content)
    with pytest.raises(ConfigError, match="trains on tasks and has no text"):
        assert study.text
    with pytest.raises(ConfigError, match="a study of tasks has no verdicts to wait for"):
        seed_limit(study, True, 3)

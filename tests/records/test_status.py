"""How far a study is, from its records alone."""

from dataclasses import replace

import pytest

from basecap.cli.output import status_line, status_row
from basecap.errors import ConfigError
from basecap.records import StudyRecords
from basecap.records.status import RunStatus, study_status, time_left
from tests.records.made_up import run_info

STUDY = {
    "name": "made up",
    "train": {"tokens": 1000},
    "seeds": [0, 1],
    "reference": "base",
    "reference_seeds": [0],
    "architectures": [{"name": "base"}, {"name": "other"}],
}


def test_runs_in_each_state_are_read_from_the_records(tmp_path):
    records = StudyRecords(tmp_path)
    with pytest.raises(ConfigError, match="holds no study"):
        study_status(records)
    records.create(STUDY)
    for name, seed, status, tokens in (("base", 0, "finished", 1024), ("other", 0, "running", 400)):
        run = records.run(name, seed)
        run.write_info(run_info(name, seed=seed, status=status, tokens=1000))
        for step in (1, 2):
            row = {"step": step, "tokens": tokens - 2 + step, "train_loss": 2.5, "tokens_per_s": 10.0 * step}
            run.append_metrics(row)
    with (records.run("other", 0).path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')  # its process writes this row now
    with records.entered(), records.claimed(records.run("other", 0)):
        done, training, waiting = study_status(records)
    assert (done.state, training.state, waiting.state) == ("finished", "training", "waiting")
    assert done.tokens == done.total == 1024  # whole steps
    assert training == RunStatus(name="other", seed=0, state="training", tokens=400, total=1000, loss=2.5, rate=15.0)
    assert training.seconds_left == 40.0 and done.seconds_left is waiting.seconds_left is None
    assert (waiting.name, waiting.seed) == ("other", 1)
    assert time_left([done, training, waiting]) == 600 / 15 + 1000 / 15
    assert status_line([done, training, waiting]) == (
        "3 runs: 1 finished, 1 training, 1 waiting; about 1 min 47 s left at this pace, without evaluations."
    )
    assert status_line([replace(done, state="imported")]) == "1 run: 1 imported."
    assert status_row(training)["seconds left"] == 40
    (stopped,) = [run for run in study_status(records) if (run.name, run.seed) == ("other", 0)]
    assert stopped.state == "stopped" and time_left([done, stopped, waiting]) is None


def test_runs_of_a_study_of_tasks_have_the_names_of_their_tasks(tmp_path):
    records = StudyRecords(tmp_path)
    entries = [{"name": "base"}, {"name": "other", "tasks": ["copying"]}]
    task = {"train": {"copying": {}, "mqar": {}}}
    records.create({**STUDY, "seeds": [0], "reference_seeds": None, "task": task, "architectures": entries})
    records.run("base on copying", 0).write_info(
        run_info("base on copying", status="failed", message="no memory", tokens=None)
    )
    failed, *waiting = study_status(records)
    assert failed.message == "no memory" and status_row(failed)["why"] == "no memory"
    assert [run.name for run in waiting] == ["base on mqar", "other on copying"]

"""A sweep of learning rates: planned, trained, chosen once, resumed where it was killed."""

import math
from pathlib import Path

import pytest
import yaml

from basecap.analysis import analyse
from basecap.errors import ConfigError, DataError
from basecap.plan.checks import check
from basecap.plan.estimate import estimate
from basecap.plan.runs import RunSpec, plan_runs
from basecap.plan.workloads import data_of
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.records.measured import Record
from basecap.run import sweep
from basecap.run.execute import execute
from basecap.run.executors import Resources, in_process
from basecap.study.config import StudyConfig, load_study, select
from tests.records.made_up import run_info
from tests.run._execute import PLUGIN
from tests.small_study import WORDS

#: With the last one the weights leave the range of fp32 at once.
RATES = [1e-3, 1e-2, 1e30]


@pytest.fixture
def path(study: dict, tmp_path: Path) -> Path:
    study["train"] |= {"tokens": 768, "eval_every": 768, "lr": RATES}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study | {"seeds": [0, 1], "reference_seeds": [0, 1, 2]}))
    return path


def run(path: Path, out: Path, *settings: str, only: tuple[str, ...] = (), plugins=()) -> tuple[list[dict], list[str]]:
    """Run a study; return what is known of its runs, and what was said."""
    study, said = load_study(str(path), settings), []
    options = {"plugins": plugins, "allow_unproved": True}  # a mixer that is not finite is not proved
    infos = execute(study, out, only=select(study, only), on=Resources(device="cpu"), log=said.append, **options)
    return infos, said


def curves(out: Path) -> dict[str, list]:
    """Return the losses of every run by its directory, those of the sweep too."""
    records = StudyRecords(out)
    found = (*records.runs(), *records.runs(sweep=True))
    return {str(run.path.relative_to(out)): [row["train_loss"] for row in run.metrics()] for run in found}


def test_a_sweep_is_trained_chosen_and_kept(path, tmp_path):
    out = tmp_path / "out"
    infos, said = run(path, out)
    assert [(info.name, info.seed, info.lr, info.status) for info in infos] == [
        (name, seed, 0.01, "finished")
        for name, seed in (
            ("transformer++", 0),
            ("window 4", 0),
            ("transformer++", 1),
            ("window 4", 1),
            ("transformer++", 2),
        )
    ]
    assert [line.partition(": ")[0] for line in said] == [
        "transformer++ (lr 1e+30, seed 0) failed",
        "window 4 (lr 1e+30, seed 0) failed",
        "transformer++",
        "window 4",
    ]
    assert "learning rate 0.01 is the best of 0.001, 0.01, 1e+30 (loss " in said[2] and "edge" not in said[2]
    names = ("transformer++", "window_4-9ed7fd")
    tried = {path.name for path in (out / "sweep").iterdir()}
    assert tried == {f"{name}-lr{rate}-s0" for name in names for rate in ("0.001", "1e+30")}
    compared = [(run.name, run.seed) for run in analyse([out])[0].runs]
    assert len(compared) == len(set(compared)) == 5

    first, second = StudyRecords(out).sweeps()
    assert (first.name, first.seed, first.split, first.rates) == ("transformer++", 0, "validation", tuple(RATES))
    assert first.losses[1] < first.losses[0] and first.losses[2] is None and first.chosen == 0.01
    assert second.losses != first.losses
    (record,) = (found for found in StudyRecords(out).run("transformer++", 0).evals() if found.eval == "sweep")
    data = data_of(load_study(str(path)), out)
    seen = sum(data.documents("validation", domain).total_tokens for domain in ("prose", "notes"))
    assert (record.n, record.value) == (seen, first.losses[1]) and set(WORDS) - {"prose", "notes"} == {"code"}

    held, before = (out / "sweep.json").read_bytes(), curves(out)
    assert run(path, out) == (infos, [])
    infos, said = run(path, out, "seeds=[2]", "architectures=[transformer++, {name: more, use: transformer++}]")
    assert {(info.name, info.seed, info.lr) for info in infos if info.name == "more"} == {("more", 2, 0.01)}
    assert len(said) == 2 and [found.seed for found in StudyRecords(out).sweeps()] == [0, 0, 0]
    assert (out / "sweep.json").read_bytes()[: len(held) - 8] == held[:-8]
    assert before.items() < curves(out).items()
    with pytest.raises(ConfigError, match=r"another study .train\.lr is \[0\.001, 0\.01, 1e\+30\] there and "):
        run(path, out, "train.lr=[1e-3, 1e-2]")


def test_a_sweep_goes_on_where_it_was_killed(path, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    chosen = {"only": ("transformer++",)}
    run(path, tmp_path / "straight", **chosen)
    out, attempt = tmp_path / "out", in_process.train_run
    with monkeypatch.context() as patch:
        left = iter([attempt, attempt, killed])
        patch.setattr(in_process, "train_run", lambda *arguments: next(left)(*arguments))
        with pytest.raises(KeyboardInterrupt):
            run(path, out, **chosen)
    assert len(curves(out)) == 2 and not (out / "runs").exists()
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_move", killed)
        with pytest.raises(KeyboardInterrupt):
            run(path, out, **chosen)
    assert len(StudyRecords(out).sweeps()) == 1 and not (out / "runs").exists()
    _, said = run(path, out, **chosen)
    assert not said and curves(out) == curves(tmp_path / "straight")
    assert StudyRecords(out).sweeps() == StudyRecords(tmp_path / "straight").sweeps()


def test_an_architecture_that_diverges_at_every_rate_is_failed(path, tmp_path):
    plugin = tmp_path / "breaks_everywhere.py"
    plugin.write_text(PLUGIN.replace('"breaks"', '"breaks everywhere"'))
    load_plugin(plugin)
    settings = ("train.lr=[1e-3, 1e-2]", "architectures=[transformer++, breaks everywhere]", "reference_seeds=[0]")
    infos, said = run(path, tmp_path / "out", *settings, plugins=(plugin,))
    assert [(info.name, info.lr, info.status) for info in infos] == [
        ("breaks everywhere", 1e-3, "failed"),
        ("breaks everywhere", 1e-2, "failed"),
        ("transformer++", 1e-2, "finished"),
    ]
    assert said[-1].startswith("breaks everywhere: no learning rate is chosen, as all of its sweep diverged; add lower")
    assert "at the edge of the sweep; widen train.lr" in said[-2]


@pytest.fixture
def planned(path: Path) -> list[RunSpec]:
    return [spec for spec in plan_runs(load_study(str(path)), 257) if spec.name == "window 4"]


@pytest.mark.parametrize(
    ("outcomes", "chosen", "words"),
    [
        ((3.0, 2.0, 2.5), 1e-2, "learning rate 0.01 is the best of 0.001, 0.01, 1e+30 (loss 2.000 on test documents)."),
        ((2.0, 2.0, None), 1e-3, "(loss 2.000 on test documents), at the edge of the sweep; widen train.lr"),
        ((3.0, math.nan, None), 1e-3, "the best of 0.001, 0.01, 1e+30 (loss 3.000"),
        ((3.0, "failed", 1.0), None, "no learning rate is chosen, as a run of its sweep failed; run the same command"),
        ((3.0, "running", None), None, "no learning rate is chosen, as a run"),
        ((None, None, math.nan), None, "no learning rate is chosen, as all of its sweep diverged"),
    ],
)
def test_what_is_chosen_and_said(planned, tmp_path, outcomes, chosen, words):
    records, said = StudyRecords(tmp_path / "out"), []
    for spec, outcome in zip(planned, outcomes, strict=True):
        place = records.run(spec.name, spec.seed, spec.rate)
        status = "failed" if outcome is None else outcome if isinstance(outcome, str) else "finished"
        place.write_info(run_info(spec.name, status=status, diverged=outcome is None))
        if isinstance(outcome, float):
            named = {"eval": "sweep", "subset": "test", "metric": "loss", "n": 100}
            place.append_evals([Record(step=3, tokens=768, **named, value=outcome)])
    sweep.choose_rates(records, planned, said.append)
    assert len(said) == 1 and words in said[0] and said[0].startswith("window 4: ")
    assert sweep.chosen_rates(records) == ({} if chosen is None else {"window 4": chosen})
    assert [found.path.name for found in records.runs()] == ([] if chosen is None else ["window_4-9ed7fd-s0"])


def test_a_damaged_choice_is_named(tmp_path):
    (tmp_path / "sweep.json").write_text('{"schema": 1, "sweeps": [{"name": "a"}]}')
    with pytest.raises(DataError, match=r"sweep\.json is damaged; restore it, or remove it to choose the rates"):
        StudyRecords(tmp_path).sweeps()


def test_a_sweep_is_planned_in_two_stages(path):
    study = load_study(str(path))
    runs = plan_runs(study, 257)
    assert [(spec.name, spec.seed, spec.rate) for spec in runs] == [
        (name, 0, rate) for name in ("transformer++", "window 4") for rate in RATES
    ]
    after = plan_runs(study, 257, {"transformer++": 1e-2})
    assert [(spec.seed, spec.train.lr, spec.rate) for spec in after if spec.name == "transformer++"] == [
        (seed, 1e-2, None) for seed in (0, 1, 2)
    ]
    assert after[0].hash == runs[1].hash  # the run of the sweep becomes the run that is compared
    rows = estimate(check(study), path.parent)
    assert [row["lr"] for row in rows] == RATES * 2 + ["the best"] * 3


def test_one_rate_is_no_sweep(path):
    study = load_study(str(path), ["train.lr=[1e-3]"])
    assert study.train.lr == 1e-3 and not study.train.sweep and not any(spec.sweep for spec in plan_runs(study, 257))
    assert StudyConfig.model_validate(load_study(str(path)).model_dump(mode="json")).train.sweep == tuple(RATES)


@pytest.mark.parametrize("own", [[1e-3, 1e-2], 1e-3])
def test_an_architecture_has_no_rates_of_its_own_in_a_sweep(path, own):
    entry = {"name": "other", "use": "transformer++", "train": {"lr": own}}
    study = load_study(str(path), [f"architectures=[transformer++, {entry}]"])
    words = "architecture 'other': a sweep of train.lr is the same for all architectures; set it for the study."
    with pytest.raises(ConfigError, match=words):
        plan_runs(study, 257)

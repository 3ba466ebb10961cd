"""Studies that grow until they are decided: which looks there are, what each trains, what a kill costs."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from basecap.analysis import TextResults, analyse
from basecap.analysis.rows import Row
from basecap.analysis.sequential import Looks
from basecap.cli.options import seed_limit
from basecap.errors import ConfigError, DataError
from basecap.records import RunInfo, StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.run.until_decided import train_until_decided
from basecap.study.config import StudyConfig, load_study, select
from tests.forks import command, start
from tests.records.made_up import change, run_info
from tests.report import made_up

LETTERS = "abcdefghijkl"


class Trained:
    """Stands for training: remembers which seeds were asked for of whom, and writes the study as it would."""

    def __init__(self, records: StudyRecords, fails: Sequence[str] = ()):
        self.records = records
        self.fails = fails
        self.calls: list[dict[str, list[int]]] = []

    def __call__(self, study: StudyConfig, *, only: set[str]) -> list[RunInfo]:
        self.records.create(study.model_dump(mode="json"))
        self.calls.append({name: list(study.seeds_of(name)) for name in sorted(only)})
        return [
            run_info(name, seed=seed, status="failed" if name in self.fails else "finished")
            for name in only
            for seed in study.seeds_of(name)
        ]


@pytest.fixture
def config(study: dict, tmp_path: Path) -> Callable[..., StudyConfig]:
    """Return a study of three architectures, with changed keys."""

    def make(**changes: Any) -> StudyConfig:
        entries = [{"name": name, "use": "transformer++"} for name in ("base", "a", "b")]
        path = tmp_path / "grows.yaml"
        path.write_text(yaml.safe_dump(study | {"architectures": entries, "reference": "base"} | changes))
        return load_study(str(path))

    return make


@pytest.fixture
def found(monkeypatch) -> list[list[Row]]:
    """Return the rows that each analysis will find, one list per look."""
    rows: list[list[Row]] = []

    def analyse(_: Sequence[Path]) -> list[TextResults]:
        return [made_up.study(*rows.pop(0))]

    monkeypatch.setattr("basecap.run.until_decided.analyse", analyse)
    return rows


def grow(study: StudyConfig, out: Path, most: int, fails: Sequence[str] = ()) -> tuple[Trained, list[str]]:
    """Let a study grow; return what was trained and what was said."""
    records, said = StudyRecords(out), []
    trained = Trained(records, fails)
    train_until_decided(study, records, most, select(study, []), trained, said.append)
    return trained, said


def keeps(name: str) -> Row:
    return made_up.row(name, 0.0, 0.01, "keeps")


def test_seeds_are_added_to_all_until_every_row_is_decided(config, found, tmp_path):
    found += [
        [keeps("a"), made_up.undecided("b", 1)],
        [made_up.undecided("a", 1), keeps("b")],
        [keeps("a"), keeps("b")],
    ]
    trained, said = grow(config(seeds=[3, 5], reference_seeds=[0, 1, 2, 9, 4]), tmp_path / "out", 8)
    assert [call["a"] for call in trained.calls] == [[3, 5], [3, 5, 6], [3, 5, 6, 7]]
    assert [len(call["base"]) for call in trained.calls] == [5, 8, 10] and trained.calls[-1]["base"][5:] == [
        *range(10, 15)
    ]
    assert StudyRecords(tmp_path / "out").looks() == {"most": 8, "looks": [2, 3, 4], "behind": []}
    assert said == [
        "2 of at most 8 seeds: undecided: b; adding seeds.",
        "3 of at most 8 seeds: undecided: a; adding seeds.",
        "4 of at most 8 seeds: every row is decided.",
    ]


def test_what_seeds_cannot_decide_gets_none(config, found, tmp_path):
    late = made_up.without_gap("b", "behind", "its loss is high")
    found += [[made_up.undecided("a", 3), late], [made_up.undecided("a"), late]]
    trained, said = grow(config(), tmp_path / "out", 8)
    assert trained.calls == [{"a": [0], "b": [0], "base": [0]}, {"a": [0, 1], "base": [0, 1]}]
    assert said[0].endswith("undecided: a; behind, needs more tokens and gets no more seeds: b; adding seeds.")
    assert said[1].startswith("2 of at most 8 seeds: undecided, and seeds alone will not change that: a; behind")


def test_a_verdict_on_these_models_only_is_none_to_stop_at(config, found, tmp_path):
    alone = made_up.undecided("a", verdict="keeps", conditional=True)
    found += [[alone], [keeps("a")]]
    assert len(grow(config(), tmp_path / "out", 2)[0].calls) == 2


@pytest.mark.parametrize("verdict", ["early", "maturity unknown"])
def test_rows_that_are_too_young_get_no_more_seeds(config, found, tmp_path, verdict):
    young = made_up.undecided("a", 1, verdict=verdict, conditional=True)
    found += [[young, keeps("b")]]
    trained, said = grow(config(), tmp_path / "out", 8)
    assert len(trained.calls) == 1
    assert said == [f"1 of at most 8 seeds: {verdict}, which more seeds will not change: a."]


def test_an_architecture_that_fails_is_not_grown_and_a_reference_that_fails_ends_all(config, found, tmp_path):
    open_ = [made_up.undecided("a", 1), made_up.undecided("b", 1)]
    found += [open_] * 3
    trained, said = grow(config(), tmp_path / "one", 2, fails=["b"])
    assert "b" not in trained.calls[1] and said[-1].startswith("2 of at most 2 seeds: undecided: a")
    assert len(grow(config(), tmp_path / "two", 8, fails=["base"])[0].calls) == 1


def test_a_study_goes_on_at_the_look_it_was_at(config, found, tmp_path):
    """Killed while it trained its third seed, and later grown by hand: no look is repeated, none is left out."""
    out = tmp_path / "out"
    held = config(seeds=[0, 1, 2])
    StudyRecords(out).create(held.model_dump(mode="json"))
    StudyRecords(out).write_looks({"most": 8, "looks": [2], "behind": ["b"]})
    found += [[keeps("a")]] * 3
    assert grow(config(seeds=[0, 1]), out, 8)[0].calls == [{"a": [0, 1, 2], "base": [0, 1, 2]}]
    assert StudyRecords(out).looks() == {"most": 8, "looks": [2, 3], "behind": ["b"]}
    assert grow(config(seeds=[0, 1]), out, 8)[0].calls == [{"a": [0, 1, 2], "base": [0, 1, 2]}]
    assert StudyRecords(out).looks()["looks"] == [2, 3]
    grow(config(seeds=[*range(6)]), out, 8)
    assert StudyRecords(out).looks()["looks"] == [2, 3, 6]
    with pytest.raises(ConfigError, match="more of them at the same seeds would be another look"):
        grow(config(seeds=[*range(6)], reference_seeds=[*range(7)]), out, 8)
    with pytest.raises(ConfigError, match="are planned for at most 8 seeds; give --max-seeds 8, or another --out"):
        grow(config(), out, 9)
    change(out / "looks.json", looks=[3, 2])
    with pytest.raises(DataError, match=r"looks\.json is damaged"):
        grow(config(), out, 8)
    (out / "looks.json").unlink()
    with pytest.raises(ConfigError, match="has 6 seeds, more than --max-seeds 4"):
        grow(config(), out, 4)


@pytest.mark.parametrize(
    ("until_decided", "most", "words"),
    [
        (False, 4, "--max-seeds limits what --until-decided adds; give both"),
        (True, None, "add --max-seeds N"),
        (True, 1, "the study has 3 seeds and --max-seeds is 1; give at least 3"),
        (True, 2, "the study has 3 seeds and --max-seeds is 2; give at least 3"),
    ],
)
def test_limits_that_make_no_sense_are_refused(config, until_decided, most, words):
    with pytest.raises(ConfigError, match=words):
        seed_limit(config(seeds=[0, 1, 2]), until_decided, most)


def test_a_study_without_verdicts_is_refused(config, study):
    mixed = study["data"] | {"train": ["prose", "notes", "code"], "ood": []}
    with pytest.raises(ConfigError, match="no verdicts to wait for"):
        seed_limit(config(data=mixed), True, 4)
    assert seed_limit(config(data=mixed), False, None) is None and seed_limit(config(), True, 4) == 4


def test_several_processes_per_run_are_refused(config, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with pytest.raises(ConfigError, match="does not run under torchrun"):
        seed_limit(config(), True, 4)


def letters_study(root: Path) -> Path:
    """Write a study in which the letters of a document say more than the one before: a tiny model beats a bigram."""
    for domain, kinds, documents in (("two", 2, 450), ("three", 3, 75)):
        source = random.Random(domain)
        (root / "text" / domain).mkdir(parents=True)
        for index in range(documents):
            some = source.sample(LETTERS, kinds)
            (root / "text" / domain / f"{index}.txt").write_text("".join(source.choice(some) for _ in range(40)))
    data = {"source": "text", "path": str(root / "text"), "tokenizer": "bytes", "seq_len": 32, "workers": 1}
    content = {
        "name": "letters",
        "data": data | {"train": ["two"], "ood": ["three"]},
        "model": {"hidden": 16, "layers": 1},
        "train": {"tokens": 20480, "batch": 8, "lr": 3e-2, "warmup": 1, "eval_every": 2048},
        "architectures": ["transformer++", {"name": "window 8", "use": "transformer++", "mixer": {"window": 8}}],
        "evals": ["domain-loss", {"copying": {"at": "every", "length": 16}}],
    }
    path = root / "letters.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_killed_study_repeats_nothing_and_spends_nothing_twice(tmp_path):
    """Killed in its second look; the first one has a single seed, which decides nothing whatever the numbers are."""
    out = tmp_path / "out"
    options = ["--until-decided", "--max-seeds", "2", "--device", "cpu", "--out", str(out)]
    killed = start(command, "run", letters_study(tmp_path), *options, output=tmp_path / "output")
    records, deadline = StudyRecords(out), time.monotonic() + 240
    while not records.run("transformer++", 1).metrics():
        assert killed.is_alive() and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert "1 of at most 2 seeds: undecided: window 8; adding seeds." in (tmp_path / "output").read_text()
    earlier = {path: path.stat().st_mtime_ns for path in out.glob("runs/*-s0/metrics.jsonl")}
    said: list[str] = []
    config = load_study(str(tmp_path / "letters.yaml"))
    train = partial(execute, out=out, on=Resources(device="cpu"), plugins=(), log=said.append)
    train_until_decided(config, records, 2, select(config, []), train, said.append)
    assert said[-1].startswith("2 of at most 2 seeds: ") and not any(line.startswith("1 of") for line in said)
    assert len(earlier) == 2 and all(path.stat().st_mtime_ns == when for path, when in earlier.items())
    (found,) = analyse([out])
    assert found.looks == Looks(most=2, looks=(1, 2))
    assert found.level == pytest.approx(0.05 * 0.98 * (1 - (1 / 2) ** 2)) and found.confidence == 0.95
    assert [row.seeds for row in found.comparisons] == [[0, 1]]

"""Evaluations of stored weights: a finished study gains numbers without training again."""

import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml

from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError
from basecap.evals import Measurement, Outcome
from basecap.evals.influence_entropy import InfluenceEntropy
from basecap.plan.runs import costs, plan_runs
from basecap.records import RunRecords, StudyRecords
from basecap.records.evaluation_points import parse_at
from basecap.records.measured import Record
from basecap.run.continue_text import continue_text
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.run.jobs import JobFailure
from basecap.run.stored_weights import evaluate_directory
from basecap.study.config import load_study
from basecap.system.processes import WorkerKilled, WorkerPool
from tests.records.made_up import change, run_info
from tests.run._execute import run
from tests.small_study import write_text

ENTROPY = "influence-entropy: {length: 32, split: test}"
#: Averaged weights, as the numbers of stored weights must be those of the average.
SETTINGS = ("train.average=0.1", "architectures=[transformer++]")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    data = {"source": "text", "path": str(write_text(root / "text")), "tokenizer": "bytes", "seq_len": 32}
    study = {
        "name": "tiny",
        "data": {**data, "train": ["prose", "notes"], "ood": ["code"], "workers": 1},
        "model": {"hidden": 16, "layers": 1},
        "train": {"tokens": 2560, "batch": 8, "lr": 1e-2, "warmup": 1, "eval_every": 512},
        "architectures": ["transformer++"],
        "evals": ["domain-loss"],
    }
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


@pytest.fixture(scope="module")
def trained(path, tmp_path_factory) -> Path:
    """Train with one evaluation, keeping the weights of every second evaluation point."""
    out = tmp_path_factory.mktemp("trained") / "out"
    run(path, out, (*SETTINGS, "train.keep=2"))
    return out


@pytest.fixture
def out(trained, tmp_path) -> Path:
    """Return a copy of the trained study."""
    return Path(shutil.copytree(trained, tmp_path / "out"))


def add(
    out: Path, *names: str, at: str | None = None, only: tuple[str, ...] = (), per_device: int = 1
) -> tuple[int, list[str]]:
    said: list[str] = []
    on = Resources(device="cpu", per_device=per_device)
    options = {"only": only, "on": on, "plugins": (), "log": said.append}
    return evaluate_directory(out, add=names, at=None if at is None else parse_at(at), **options), said


def entropies(out: Path) -> dict[int, list[Record]]:
    """Return the entropies of the one run by step."""
    found = [record for record in StudyRecords(out).runs()[0].evals() if record.eval == "influence-entropy"]
    return {step: [one for one in found if one.step == step] for step in sorted({one.step for one in found})}


def test_a_finished_study_gains_the_numbers_that_training_would_have_given(path, out, tmp_path):
    run(path, tmp_path / "named", (*SETTINGS, f"evals=[domain-loss, {{{ENTROPY}}}]"))
    expected, before = entropies(tmp_path / "named"), StudyRecords(out).runs()[0].metrics()
    assert list(expected) == [2, 4, 6, 8, 10]
    failed, said = add(out, ENTROPY, at="every")
    assert failed == 0 and said == [
        "influence-entropy ran on the weights of 3 evaluation points; the report has its numbers.",
        "influence-entropy: missing at 2 evaluation points of transformer++ (seed 0) (tokens: 512, 1536), whose "
        "weights are not stored; new runs store more with train.keep.",
    ]
    assert entropies(out) == {step: expected[step] for step in (4, 8, 10)}
    records = StudyRecords(out)
    assert records.runs()[0].metrics() == before and set(records.declarations()) == {"domain-loss", "influence-entropy"}
    assert records.study()["evals"] == [
        "domain-loss",
        {"influence-entropy": {"at": "every", "length": 32, "split": "test"}},
    ]
    held = (records.runs()[0].path / "evals.jsonl").read_bytes()
    assert run(path, out, (*SETTINGS, "train.keep=all"))[0].status == "finished"  # a study that lacks it keeps it
    assert add(out) == (0, said[1:]) and (records.runs()[0].path / "evals.jsonl").read_bytes() == held


def test_a_study_that_names_more_evaluations_gets_them_without_training(path, out):
    before = StudyRecords(out).runs()[0].metrics()
    run(path, out, (*SETTINGS, f"evals=[{{{ENTROPY[:-1]}, at: end}}}}]"))
    assert list(entropies(out)) == [10] and StudyRecords(out).runs()[0].metrics() == before
    assert [*StudyRecords(out).declarations()] == ["domain-loss", "influence-entropy"]


def test_evaluations_run_where_they_say(path, tmp_path):
    settings = (*SETTINGS, "evals=[domain-loss, {influence-entropy: {length: 32, split: test, at: [1024, 2048]}}]")
    run(path, tmp_path / "out", settings)
    assert list(entropies(tmp_path / "out")) == [4, 8]
    assert [found.name for found in StudyRecords(tmp_path / "out").runs()[0].weights.iterdir()] == ["step-10"]


def test_tokens_that_are_no_evaluation_point_mean_the_nearest(path, out, tmp_path):
    """Of a run that is evaluated after each 512 tokens; two numbers for one point are one."""
    study = load_study(
        str(path), (*SETTINGS, "evals=[domain-loss, {influence-entropy: {length: 32, at: [900, 1100]}}]")
    )
    said: list[str] = []
    execute(study, tmp_path / "new", only={"transformer++"}, on=Resources(device="cpu"), plugins=(), log=said.append)
    assert list(entropies(tmp_path / "new")) == [4]
    words = "tokens are no evaluation point; the nearest is after 1024."
    assert [line for line in said if "evaluation point" in line] == [
        f"evals: influence-entropy: at: {tokens} {words}" for tokens in (900, 1100)
    ]
    failed, said = add(out, ENTROPY, at="9e3")
    assert failed == 0 and list(entropies(out)) == [10]
    assert said[0] == "--at: 9000 tokens are no evaluation point; the nearest is after 2560."


@pytest.mark.parametrize("kind", ["evaluation", "task", "source"])
def test_a_plugin_that_the_study_needs_is_named(out, kind):
    records = StudyRecords(out)
    records.write_environment({**records.environment(), "plugins": {kind: {"words": "own/my words.py"}}})
    words = rf"out has the {kind} 'words' of a plugin that is not given; add --plugin 'own/my words\.py'\."
    with pytest.raises(ConfigError, match=words):
        add(out, ENTROPY)


def test_the_plugin_of_a_source_is_named_where_its_study_is_read(out):
    records = StudyRecords(out)
    study = records.study()
    records.create(study | {"data": study["data"] | {"source": "words"}})
    records.write_environment({**records.environment(), "plugins": {"source": {"words": "words.py"}}})
    words = r"out has the source 'words' of a plugin that is not given; add --plugin words\.py\."
    with pytest.raises(ConfigError, match=words):
        load_study(str(out / "study.yaml"))
    with pytest.raises(ConfigError, match=words):
        continue_text(records.runs()[0].path, ["the"], 1, temperature=0.0, top_k=None, seed=0, device="cpu")


def test_an_architecture_whose_plugin_is_not_given_is_left_out(out):
    records = StudyRecords(out)
    study, mine = records.study(), out / "runs" / "mine-s0"
    study["architectures"].append({"name": "mine", "use": "mine"})
    records.create(study)
    RunRecords(mine).write_info(run_info("mine", plugins={"0123": "mine.py"}))
    assert add(out, ENTROPY, at="end") == (
        0,
        [
            "mine is left out, as its plugin is not given; add --plugin mine.py.",
            "influence-entropy ran on the weights of 1 evaluation point; the report has its numbers.",
        ],
    )
    with pytest.raises(ConfigError, match="unknown mixer 'mine'"):
        add(out, only=("mine",))


@pytest.mark.parametrize(("at", "steps"), [(None, [10]), ("end", [10]), ("2048", [8]), ("[1024, 2.048e3]", [4, 8])])
def test_an_added_evaluation_runs_where_asked(out, at, steps, monkeypatch):
    monkeypatch.chdir(StudyRecords(out).runs()[0].path)
    assert add(Path(), ENTROPY, at=at)[0] == 0 and list(entropies(out)) == steps


def test_one_damaged_point_costs_only_itself(out):
    weights = StudyRecords(out).runs()[0].weights / "step-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    failed, said = add(out, ENTROPY, at="every")
    assert failed == 1 and list(entropies(out)) == [4, 10]
    assert said[0].startswith("influence-entropy of transformer++ (seed 0) failed at step 8: ")
    assert said[0].endswith("step-8 is damaged (model.safetensors does not match SHA256SUMS); remove it.")


def test_weights_that_were_cut_short_are_found_without_an_evaluation(path, out):
    def run_again() -> list[str]:
        said: list[str] = []
        study = load_study(str(path), (*SETTINGS, "train.keep=2"))
        execute(study, out, only={"transformer++"}, on=Resources(device="cpu"), plugins=(), log=said.append)
        return said

    assert run_again() == []
    weights = StudyRecords(out).runs()[0].weights
    cut, gone = weights / "step-8" / "model.safetensors", weights / "step-4" / "state.json"
    os.truncate(cut, cut.stat().st_size - 4)
    gone.unlink()
    assert run_again() == [
        f"{file} is missing or cut short; restore it, or remove {file.parent}: it is of no use." for file in (gone, cut)
    ]


def test_a_point_that_lacks_memory_beside_others_is_evaluated_again(out, monkeypatch):
    """The first process is killed, and a second time; the second finds no memory once; the third fails otherwise."""
    full, other = JobFailure(message="CUDA out of memory. Tried to allocate 2 GiB."), JobFailure(message="cannot")
    ends = [[WorkerKilled(), WorkerKilled()], [{"influence-entropy": full}, {}], [{"influence-entropy": other}]]

    def run(pool, job, points, crowded):
        for point, results in zip(points, ends, strict=True):
            for result in results:
                future: Future = Future()
                future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
                again = crowded(point, future, {"place", "machine"}) and result is not results[-1]
                if not again:
                    yield point, future

    monkeypatch.setattr(WorkerPool, "run", run)
    failed, said = add(out, ENTROPY, at="[1024, 2048, 2560]", per_device=2)
    killed = "was killed, possibly out of memory"
    again = "beside others; it starts again when one of them has ended."
    assert failed == 2 and said == [
        f"transformer++ (seed 0): its evaluation at step 4 {killed}, {again}",
        f"transformer++ (seed 0): its evaluation at step 4 {killed}, {again}",
        f"influence-entropy of transformer++ (seed 0) failed at step 4: its process {killed}; free memory and run the "
        "same command again.",
        f"transformer++ (seed 0): its evaluation at step 8 found too little memory {again}",
        "influence-entropy of transformer++ (seed 0) failed at step 10: cannot",
        "influence-entropy ran on the weights of 1 evaluation point; the report has its numbers.",
    ]


def test_what_measures_nothing_is_asked_once(out, monkeypatch):
    asked = []

    def run(evaluation, model, context):
        asked.append(evaluation)
        return Outcome(measurements=[])

    monkeypatch.setattr(InfluenceEntropy, "run", run)
    said = "influence-entropy has no numbers for transformer++ (seed 0): it does not apply to such models."
    assert add(out, ENTROPY, at="end") == (0, [said])
    assert add(out) == (0, []) and len(asked) == 1


def test_runs_trained_before_weights_were_stored_are_evaluated_from_their_checkpoints(out):
    shutil.rmtree(StudyRecords(out).runs()[0].weights)
    assert add(out, ENTROPY, at="every")[0] == 0 and list(entropies(out)) == [8, 10]


@pytest.mark.parametrize(
    ("names", "at", "words"),
    [
        (["influence-entrophy"], None, r"influence-entrophy.*did you mean 'influence-entropy'\?"),
        (["influence-entropy: {length: 32, lenght: 3}"], None, "unknown option 'lenght'"),
        (["domain-loss: {split: validation}"], None, r"domain-loss' with other options \(split is 'test' there and "),
        (["[domain-loss]"], None, "is not an evaluation; write NAME"),
        (["copying: 5"], None, "is not an evaluation; write NAME"),
        ([ENTROPY], "never", "--at 'never' should be every, end or a number of tokens"),
        (
            [ENTROPY],
            "[500, 1536]",
            "influence-entropy cannot be measured after 512, 1536 tokens, as no weights of that point are stored; give "
            "--at a number of tokens with weights: 1024, 2048, 2560.",
        ),
    ],
)
def test_bad_input_leaves_the_study_as_it_was(out, names, at, words):
    held = (out / "study.yaml").read_bytes()
    with pytest.raises(ConfigError, match=words):
        add(out, *names, at=at)
    assert (out / "study.yaml").read_bytes() == held and not entropies(out)


def test_what_cannot_be_evaluated_is_said(out, tmp_path):
    place = StudyRecords(out).runs()[0].path
    with pytest.raises(ConfigError, match=r"holds no study \(no study\.yaml\)"):
        add(tmp_path / "elsewhere", ENTROPY)
    for store in ("resume", "weights"):
        shutil.rmtree(place / store)
    with pytest.raises(ConfigError, match=r"transformer\+\+-s0 has no stored weights; remove"):
        add(place, ENTROPY)
    change(place / "run.json", status="running")
    with pytest.raises(ConfigError, match="out has no finished run; finish one with `basecap run`"):
        add(out, ENTROPY)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("evals=[{domain-loss: {at: [x]}}]", r"should be every, end or a list of tokens, such as \[1000000\]"),
        ("train.keep=0", r"train\.keep = 0: should be last, all or a number of evaluation points, such as 5"),
    ],
)
def test_points_that_are_no_numbers_are_refused(path, tmp_path, setting, words):
    with pytest.raises(ConfigError, match=words):
        run(path, tmp_path / "out", (setting,))


@pytest.mark.parametrize("keep", ["last", "all", 3])
def test_which_weights_stay_is_no_part_of_a_run(path, keep):
    default, other = (plan_runs(load_study(str(path), settings), 257)[0] for settings in ((), (f"train.keep={keep}",)))
    assert default.hash == other.hash


def test_the_disk_that_is_planned_is_the_disk_that_is_taken(path, trained):
    study = load_study(str(path), (*SETTINGS, "train.keep=2"))
    planned = costs(plan_runs(study, byte_tokenizer().vocab_size)[:1])[0]
    for store, expected in (("weights", planned.weights), ("resume", planned.resume)):
        files = (StudyRecords(trained).runs()[0].path / store).rglob("*.safetensors")
        assert expected == pytest.approx(sum(file.stat().st_size for file in files), rel=0.1)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (
            [Measurement(subset="code", metric="entropy", value=1.0, n=1)],
            r"axes \['layer'\], and code entropy has \[\]",
        ),
        ([Measurement(subset="code", metric="entropy", value=1.0, n=1, axis={"layer": 0.0})] * 2, "twice; return one"),
        (None, "returns a NoneType; return an Outcome of basecap.evals"),
    ],
)
def test_numbers_without_a_place_of_their_own_are_not_recorded(out, monkeypatch, measured, words):
    monkeypatch.setattr(InfluenceEntropy, "run", lambda *_: measured and Outcome(measurements=measured))
    failed, said = add(out, ENTROPY, at="end")
    assert failed == 1 and re.search(words, said[0]) and entropies(out) == {}


def test_a_failed_evaluation_keeps_its_own_name(out, monkeypatch):
    """A name may hold a comma: it is not two names, of which neither failed."""

    def fails(*_):
        raise RuntimeError("this one cannot")

    monkeypatch.setattr(InfluenceEntropy, "run", fails)
    named = 'influence-entropy: {name: "five-shot, mmlu", length: 32, split: test}'
    failed, said = add(out, named, at="end")
    assert failed == 1 and len(said) == 1
    assert said[0].startswith("five-shot, mmlu of transformer++ (seed 0) failed at step 10: ")


def test_an_evaluation_that_fails_before_it_measures_is_named(out, monkeypatch):
    monkeypatch.setattr(InfluenceEntropy, "check", lambda *_: {}["odd"])
    with pytest.raises(
        ConfigError, match="evaluation 'influence-entropy' fails: KeyError: 'odd'; fix it, or remove it"
    ):
        add(out, ENTROPY)

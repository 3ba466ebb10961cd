"""From records to results, with everything that can be missing or broken."""

import json
import math
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic_core import to_json as json_of

from basecap.analysis import TextResults, analyse
from basecap.analysis.results import Failure, to_json
from basecap.analysis.rows import Row
from basecap.analysis.sequential import AddedRuns, Tables, added_runs
from basecap.analysis.text import curve, gap
from basecap.errors import ConfigError, DataError
from basecap.records import Machine, RunRecords, StudyRecords
from basecap.records.documents import DocumentLosses
from basecap.report import write_report
from basecap.report.summary import summarise
from basecap.report.text_summary import question
from tests.records.made_up import change
from tests.report.synthetic import write_study

TWO = {"base": (1.0, 0.0), "other": (1.0, 0.2)}
RESULTS = Path(__file__).resolve().parents[2] / "results"


def study(path: Path) -> TextResults:
    """Analyse one study."""
    (found,) = analyse([path])
    assert isinstance(found, TextResults)
    return found


def only_row(path: Path) -> Row:
    """Return the one comparison of a study of two."""
    (row,) = study(path).comparisons
    return row


def test_known_gaps_are_found(tmp_path):
    write_study(tmp_path, architectures={**TWO, "same": (0.9, 0.0)}, documents=200)
    rows = {row.name: row for row in study(tmp_path).comparisons}
    assert list(rows) == ["other", "same"]
    assert rows["other"].verdict == "degrades" and rows["other"].gap.low < 0.2 < rows["other"].gap.high
    assert rows["same"].verdict == "keeps" and abs(rows["same"].gap.value) < 0.02
    assert [part.domain for part in rows["same"].domains] == ["arxiv", "github", "stackexchange"]


def test_a_run_that_has_trained_to_its_end_counts_before_its_leak_test(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=60, seeds=(0, 1))
    run = StudyRecords(tmp_path).run("other", 0)
    last = run.metrics()[-1]["tokens"]
    for budget, seeds in ((last, [0, 1]), (last + 1, [1])):
        change(run.path / "run.json", status="running", tokens=budget)
        assert only_row(tmp_path).seeds == seeds


def test_the_same_records_give_the_same_results(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=60)
    assert analyse([tmp_path]) == analyse([tmp_path])


def test_more_evaluation_points_are_no_more_files_to_read_and_no_more_fits(tmp_path, monkeypatch):
    """One file of losses per run, and one fit per run and range: of the reference, its own and one per slower row.

    Classes of tokens are fitted once per run and row, without draws.
    """
    counts, read, fit = [], Path.read_bytes, curve.fitted
    monkeypatch.setattr(Path, "read_bytes", lambda path: counts.append("read") or read(path))

    def counted(x: np.ndarray, *rest: object) -> np.ndarray:
        counts.append("fit" if len(x) > 51 else "band" if len(x) > 1 else "classes")
        return fit(x, *rest)

    monkeypatch.setattr(gap, "fitted", counted)
    for checkpoints in (10, 40):
        path = tmp_path / str(checkpoints)
        write_study(
            path, architectures={**TWO, "slow": (0.9, 0.1)}, documents=40, seeds=(0, 1), checkpoints=checkpoints
        )
        counts.clear()
        study(path)
        found = {what: counts.count(what) for what in ("read", "fit", "band", "classes")}
        # Of each of six runs: run.json twice, metrics, evaluations, losses.
        assert found["read"] <= 6 * 6 + 10
        assert found["fit"] <= 2 * (3 + 2) and found["band"] == 2 * 2 * 2
        assert found["classes"] <= 2 * (2 + 2)


def test_points_curves_and_documents(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=60, checkpoints=8, seeds=(0, 1))
    found = study(tmp_path)
    assert len(found.points) == 2 * 2 * 8
    first = found.points[0]
    domains = {name: losses.loss for name, losses in first.domains.items()}
    assert min(domains["commoncrawl"], domains["c4"]) < first.held_out < max(domains["commoncrawl"], domains["c4"])
    assert abs(first.training - first.held_out) < 0.3
    assert {row.domain: row.documents for row in found.documents}["github"] == 60
    curve = [row for row in found.curves if (row.name, row.seed) == ("base", 1)]
    assert len(curve) <= 300 and curve[-1].tokens == found.runs[1].tokens
    assert found.comparisons[0].seeds == [0, 1]


def test_the_time_of_a_run_is_that_of_its_steps_however_often_it_was_resumed(tmp_path):
    run = write_study(tmp_path, architectures=TWO, documents=60).run("other", 0)
    steps = run.metrics()
    assert study(tmp_path).runs[1].seconds == pytest.approx(sum(row["seconds"] for row in steps))
    (run.path / "metrics.jsonl").unlink()
    assert study(tmp_path).runs[1].seconds is None


def test_a_run_says_what_it_was_trained_on(tmp_path):
    run = write_study(tmp_path, architectures=TWO, documents=60).run("other", 0)
    elsewhere = Machine(device="CPU (x86_64)", precision="bf16")
    run.write_info(replace(run.info(), before=(elsewhere, elsewhere)))
    assert [row.machines for row in study(tmp_path).runs] == [
        ["NVIDIA H200, bf16"],
        ["CPU (x86_64), bf16", "NVIDIA H200, bf16"],
    ]
    run.write_info(replace(run.info(), before=(), device=None, precision=None))
    assert study(tmp_path).runs[1].machines == []  # of an earlier version
    change(run.path / "run.json", before="yesterday")
    with pytest.raises(DataError, match=r"run\.json is damaged at 'before'"):
        study(tmp_path)


def test_other_evaluations_keep_their_declaration_and_last_rows(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, checkpoints=2, more_evaluations=True)
    few_shot, passkey, _ = study(tmp_path).evaluations
    assert (few_shot.name, few_shot.better, few_shot.axes) == ("few-shot", "higher", [])
    assert passkey.axes == ["length"] and len(passkey.rows) == 10


def test_one_checkpoint_is_undecided(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, checkpoints=1)
    row = only_row(tmp_path)
    assert row.verdict == "undecided" and row.gap is None and "eval_every" in row.words


@pytest.mark.parametrize("documents", [1, 10])
def test_few_documents_give_a_range_and_no_gap(tmp_path, documents):
    write_study(tmp_path, architectures=TWO, documents=documents)
    row = only_row(tmp_path)
    assert row.verdict == "undecided" and "documents" in row.words
    assert row.range[0] < row.range[1] and row.gap is None


def test_a_model_that_is_behind_says_how_many_tokens_are_missing(tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0), "slow": (0.1, 0.0)}, documents=40)
    row = only_row(tmp_path)
    assert row.verdict == "behind" and row.gap is None
    assert "the trained range begins at" in row.words and "more tokens" in row.words


def test_without_unseen_domains_there_is_no_verdict(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, ood=[])
    row = only_row(tmp_path)
    assert row.verdict == "none" and row.gap is not None and row.words.startswith("alike: any difference")


def test_a_study_of_one_architecture_compares_nothing(tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0)}, documents=40)
    assert study(tmp_path).comparisons == []


def test_a_study_that_has_not_started(tmp_path):
    write_study(tmp_path, architectures=TWO, seeds=())
    found = study(tmp_path)
    assert found.runs == found.comparisons == []


def test_runs_of_other_seeds_are_compared_and_a_missing_reference_is_said(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40, seeds=(0, 1))
    for name, seed in (("base", 0), ("other", 1)):
        (records.run(name, seed).path / "run.json").unlink()
    row = only_row(tmp_path)
    assert (row.seeds, row.reference_seeds) == ([0], [1]) and row.conditional
    (records.run("base", 1).path / "run.json").unlink()
    assert "base has not run yet" in only_row(tmp_path).words


def test_an_architecture_that_was_left_out_has_no_row(tmp_path):
    records = write_study(tmp_path, architectures=TWO | {"third": (0.9, 0.0)}, documents=40)
    (records.run("other", 0).path / "run.json").unlink()
    found = study(tmp_path)
    assert [row.name for row in found.comparisons] == ["third"] and "Not trained: other." in summarise(found).reasons
    assert "This study tests 1 architecture and compares it with base" in question(found)


def test_a_failed_run_is_reported_and_its_checkpoints_still_count(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40)
    run = records.run("other", 0)
    run.write_info(replace(run.info(), status="failed", message="the loss stopped being finite at step 700"))
    found = study(tmp_path)
    assert found.failures == [Failure(name="other", seed=0, message="the loss stopped being finite at step 700")]
    assert found.comparisons[0].verdict == "degrades"


def losses_at(run: RunRecords, step: int) -> dict[str, DocumentLosses]:
    (found,) = run.documents("domain-loss", [step])
    documents = found.documents
    return {
        name: DocumentLosses(
            found.nats[0, place].copy(), documents.tokens[place], documents.bytes[place], documents.clusters[place]
        )
        for name, place in documents.subsets.items()
    }


def test_a_checkpoint_with_nan_is_left_out(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40)
    run = records.run("other", 0)
    whole = only_row(tmp_path)
    losses = losses_at(run, 920)
    losses["github"].nats[3] = np.nan
    run.append_documents("domain-loss", 920, losses)
    row = only_row(tmp_path)
    assert math.isfinite(row.gap.low) and row.range[0] > whole.range[0]


def test_other_documents_than_the_reference_are_not_compared(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40)
    run = records.run("other", 0)
    for step in sorted({record.step for record in run.evals() if record.eval == "domain-loss"}):
        losses = losses_at(run, step)
        losses["github"] = DocumentLosses(*(part[:-1] for part in vars(losses["github"]).values()))
        run.append_documents("domain-loss", step, losses)
    assert "other documents" in only_row(tmp_path).words


def test_a_damaged_file_costs_one_run_only(tmp_path):
    records = write_study(tmp_path, architectures={**TWO, "third": (1.0, 0.0)}, documents=40)
    path = next((records.run("other", 0).path / "documents").glob("*.losses"))
    path.write_bytes(path.read_bytes()[50:])
    found = study(tmp_path)
    (failure,) = found.failures
    assert failure.name == "other" and "damaged" in failure.message
    assert [row.gap is None for row in found.comparisons] == [True, False]


def test_losses_that_their_documents_do_not_have_are_no_result(tmp_path):
    records = write_study(tmp_path, architectures={**TWO, "third": (1.0, 0.0)}, documents=40)
    path = records.run("other", 0).path / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edited = next(row for row in reversed(rows) if row["metric"] == "loss")
    edited["value"] *= 1.001
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = study(tmp_path)
    (failure,) = found.failures
    where = f"on '{edited['subset']}' at step {edited['step']}"
    said = rf"\S+evals\.jsonl says a loss of {edited['value']:.6g} {where}, and its documents have \d"
    assert failure.name == "other" and re.match(said, failure.message)
    assert [row.gap is None for row in found.comparisons] == [True, False]


def test_an_archive_whose_losses_of_documents_are_rounded_is_read_whole(tmp_path):
    """Those of the figures are rounded to eight nats, more than those of any other archive."""
    with tarfile.open(RESULTS / "figures" / "gpu-records.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    studies = analyse(sorted(tmp_path.iterdir()))
    assert [len(found.runs) for found in studies] == [9, 15, 6, 9] and not any(found.failures for found in studies)


@pytest.mark.parametrize("key", ["name", "reference", "architectures", "data", "seeds", "gap"])
def test_an_incomplete_study_file_is_named(tmp_path, key):
    records = write_study(tmp_path, architectures=TWO, seeds=())
    content = {"schema": 1, **records.study()}
    del content[key]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match=rf"study\.yaml is damaged at '{key}' \(is missing\)"):
        analyse([tmp_path])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", None, "damaged at 'name'"),
        ("seed", "zero", "damaged at 'seed'"),
        ("parameters", "many", "damaged at 'parameters'"),
        ("plugins", 5, "damaged at 'plugins'"),
        ("status", None, "damaged at 'status'"),
        ("name", "third", "belongs to 'third', which is not in the study"),
    ],
)
def test_a_damaged_run_file_is_named(tmp_path, key, value, words):
    run = write_study(tmp_path, architectures=TWO, documents=40).run("other", 0)
    change(run.path / "run.json", **{key: value})
    with pytest.raises(DataError, match=rf"run\.json .*{words}"):
        analyse([tmp_path])


def test_a_copy_of_a_run_set_aside_does_not_take_its_place(tmp_path):
    """Other losses under the name and seed of a run, whose directory comes first."""
    write_study(tmp_path / "whole", architectures=TWO, documents=40)
    earlier = write_study(tmp_path / "earlier", architectures={"base": (1.0, 0.0), "other": (1.0, -0.3)}, documents=40)
    copy = earlier.run("other", 0).path.rename(tmp_path / "whole" / "runs" / "other-s0-old")
    with pytest.raises(DataError, match=r"is a copy of the run in .*other-s0; move .*other-s0-old out of the study"):
        analyse([tmp_path / "whole"])
    aside = copy.rename(tmp_path / "aside")
    assert only_row(tmp_path / "whole").gap.value == pytest.approx(0.2, abs=0.02)
    shutil.rmtree(tmp_path / "whole" / "runs" / "other-s0")
    aside.rename(copy)
    with pytest.raises(DataError, match=r"other-s0, which does not exist; rename .*/other-s0-old to other-s0\."):
        analyse([tmp_path / "whole"])


@pytest.mark.parametrize(("key", "value"), [("step", "first"), ("seconds", {}), ("tokens_per_s", "fast")])
def test_a_damaged_row_of_training_is_named(tmp_path, key, value):
    run = write_study(tmp_path, architectures=TWO, documents=40).run("other", 0)
    run.append_metrics({**run.metrics()[-1], key: value})
    with pytest.raises(DataError, match=rf"metrics\.jsonl:\d+ is damaged at '{key}'"):
        analyse([tmp_path])


def test_a_loss_over_no_token_is_none(tmp_path):
    run = write_study(tmp_path, architectures=TWO, documents=40).run("other", 0)
    path = run.path / "evals.jsonl"
    path.write_text(re.sub(r'"n": \d+', '"n": 0', path.read_text()))
    assert {row.held_out for row in study(tmp_path).points if row.name == "other"} == {None}


def test_a_directory_without_a_study_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no study"):
        analyse([tmp_path])


def test_results_survive_the_disk(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40)
    (found,) = analyse([tmp_path])
    records.write_results(to_json([found]))
    (held,) = json.loads((tmp_path / "results.json").read_text())["studies"]
    assert held.pop("from") == found.share
    assert held == {
        key: json.loads(json_of(value)) for key, value in vars(found).items() if key not in ("share", "imported")
    }


def test_no_verdict_without_the_loss_of_pairs_of_tokens(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40)
    (tmp_path / "environment.json").unlink()
    with pytest.raises(DataError, match=r"environment\.json does not hold the loss of a bigram model"):
        analyse([tmp_path])


@pytest.mark.parametrize(("bigram", "expected"), [(3.4, "behind"), (50.0, "degrades")])
def test_models_that_have_not_beaten_pairs_of_tokens_are_behind(tmp_path, bigram, expected):
    write_study(tmp_path, architectures=TWO, documents=200)
    records = StudyRecords(tmp_path)
    records.write_environment({**records.environment(), "bigram_loss": bigram})
    row = only_row(tmp_path)
    assert row.verdict == expected
    assert ("bigram" in row.words) == (expected == "behind")


def test_runs_that_were_added_after_a_table_count_as_another_look(tmp_path):
    """A table at three seeds is no look at what was planned then; a fourth seed, planned later, is one afterwards.

    Neither is a table that lacks a planned run: what is trained after it was decided before it.
    """
    pair = {"base": (1.0, 0.0), "other": (1.0, 0.2)}
    records = write_study(tmp_path / "study", architectures=pair, seeds=(0, 1, 2), documents=60)
    missing = (records.path / "runs" / "other-s2").rename(tmp_path / "later")
    write_report([records.path], records.path)
    missing.rename(records.path / "runs" / "other-s2")
    assert records.tables() == {"planned": [{"base": [0, 1, 2], "other": [0, 1, 2]}]}
    (first,) = analyse([records.path])
    assert first.added is None
    write_report([records.path], records.path)
    assert len(records.tables()["planned"]) == 1  # the same plan again
    write_study(tmp_path / "more", architectures=pair, seeds=(0, 1, 2, 3), documents=60)
    (tmp_path / "more" / "runs" / "other-s3").rename(records.path / "runs" / "other-s3")
    (unplanned,) = analyse([records.path])
    records.create(records.study() | {"seeds": [0, 1, 2, 3]})
    (planned,) = analyse([records.path])
    for found in (unplanned, planned):
        assert found.added == AddedRuns(runs={"other": [3]}, tables=1, confidence=pytest.approx(0.9))
    write_report([records.path], records.path)
    assert len(records.tables()["planned"]) == 2
    assert "seeds of other 3. Where what was seen led" in (records.path / "report.html").read_text()


def test_a_study_that_no_table_was_made_of_has_no_added_runs():
    """Seeds that were planned together, in whatever parts they ran."""
    assert added_runs(Tables(), {"a": [0, 1]}, [("a", 0), ("a", 1)], 0.05) is None
    assert added_runs(Tables(planned=({"a": [0]}, {"a": [0, 1]})), {"a": [0, 1, 2]}, [("a", 0), ("a", 2)], 0.05) == (
        AddedRuns(runs={"a": [2]}, tables=2, confidence=pytest.approx(0.85))
    )

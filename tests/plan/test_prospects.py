"""What a plan says of the verdicts to expect."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from basecap.data import find_prepared, prepare
from basecap.plan.checks import check
from basecap.plan.estimate import estimate, readable, remarks
from basecap.plan.evaluation_work import evaluation_work, heavy_work
from basecap.plan.prospects import cut_patterns, expected_verdicts, short_runs
from basecap.plan.runs import plan_evaluations, plan_runs, plan_study
from basecap.plan.workloads import Tasks
from basecap.records import StudyRecords
from basecap.study.config import StudyConfig, load_study
from tests.records.made_up import run_info
from tests.small_study import write_text


def said(study: dict, tmp_path: Path, *settings: str) -> str:
    """Return what is said of the study, whose text is used where it has been prepared."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    config = load_study(str(path), settings)
    return "\n".join(
        expected_verdicts(plan_study(config, config.vocabulary), find_prepared(config.data, tmp_path / "data"))
    )


@pytest.fixture
def ample(study: dict) -> dict:
    """Return a study with tokens and runs enough."""
    study["data"]["workers"] = 1
    study["train"]["tokens"] = 1_000_000
    return study | {"seeds": [0, 1, 2]}


def test_intervals_are_expected_and_compared_with_what_is_tolerated(ample, tmp_path):
    few = said(ample, tmp_path)
    assert few.startswith("Expected: intervals of +/- 0.") and "0.038 nats for the gap that is tolerated" in few
    assert "Only larger gaps will be decided; to show that an architecture has no gap takes about " in few
    needed = int(few.rpartition("about ")[2].split()[0])
    assert "Only larger" in said(ample, tmp_path, f"seeds={[*range(needed - 1)]}")
    assert "Only larger" not in said(ample, tmp_path, f"seeds={[*range(needed)]}")
    assert "more than 100 seeds" in said(ample, tmp_path, "gap.cost=0.01")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("seeds=[0]",), "Warning: one seed and fewer than three runs of transformer++"),
        (("train.eval_every=2000000",), "Warning: no verdict is possible with 1 evaluation point, as a curve needs 4"),
        (("train.schedule=wsd",), "with 1 evaluation point, as a curve needs 4; add budgets to train.branches."),
        (("train.tokens=70000",), "700 training tokens per entry of the vocabulary, here 272; raise train.tokens."),
        (("data.tokenizer=bpe", "data.vocab=8192"), "vocabulary, here 122; raise train.tokens or lower data.vocab."),
    ],
)
def test_what_may_rule_a_verdict_out_is_warned_of(ample, tmp_path, settings, words):
    assert words in said(ample, tmp_path, *settings) and "Warning" not in said(ample, tmp_path)


def test_a_hybrid_that_is_too_shallow_for_its_pattern_is_warned_of(ample, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(ample | {"architectures": ["transformer++", "kda 3:1"]}))
    warned = []
    for depth in (3, 4):
        config = load_study(str(tmp_path / "tiny.yaml"), (f"model.layers={depth}",))
        warned.append(cut_patterns(plan_study(config, config.vocabulary).runs))
    (sentence,) = warned[0]
    assert sentence.startswith("Warning: kda 3:1 has 3 of the 4 blocks of its pattern") and "model.layers=4" in sentence
    assert warned[1] == []


def test_a_warmup_longer_than_the_run_is_warned_of_once_for_each_length(ample, tmp_path):
    path, warned = tmp_path / "tiny.yaml", []
    short = {"name": "short", "use": "based", "train": {"tokens": 1280}}
    path.write_text(yaml.safe_dump(ample | {"architectures": ["transformer++", "based", short]}))
    for warmup in (4, 19, 20):
        config = load_study(str(path), ("train.tokens=5120", f"train.warmup={warmup}"))
        warned.append(short_runs(plan_study(config, config.vocabulary).runs))
    words = "Warning: train.warmup = {} is not shorter than the run of {} steps: {}; lower it or train longer."
    assert warned[0] == []
    assert warned[1] == [words.format(19, 5, "short will train without warm-up")]
    both = words.format(20, 20, "transformer++, based will warm up for 2 steps")
    assert warned[2] == [both, words.format(20, 5, "short will train without warm-up")]


def test_a_scale_of_a_few_steps_gets_one_sentence_in_place_of_warnings(ample, tmp_path):
    config = StudyConfig.model_validate(ample | {"seeds": [0], "scale": "test"})
    planned = check(config)
    lines = remarks(planned, estimate(planned, tmp_path), tmp_path)
    assert lines[-1] == "Scale test shows that the study runs; it is too small for verdicts."
    assert not any(line.startswith("Warning") for line in lines)


def test_a_tiny_study_gets_few_and_short_lines(ample, tmp_path):
    names = [{"name": f"one of many {number}", "use": "transformer++"} for number in range(9)]
    tiny = {"tokens": 8192, "eval_every": 8192, "batch": 8, "warmup": 50}
    planned = check(StudyConfig.model_validate(ample | {"architectures": ["transformer++", *names], "train": tiny}))
    rows = estimate(planned, tmp_path)
    lines = remarks(planned, rows, tmp_path)
    assert "TFLOP/s." in lines[0] and "1,000 TFLOP/s" not in "".join(lines) and max(map(len, lines)) < 260
    assert re.search(r"transformer\+\+ trains on \d[\d,]* tokens, ", " ".join(lines))
    assert any("steps: transformer++, one of many 0, one of many 1 and 7 more will warm up" in line for line in lines)
    (points,) = [line for line in lines if "evaluation point" in line]
    assert points.startswith("Warning: no verdict is possible with 1 evaluation point, as a curve needs 4; ")
    more = remarks(planned, rows, tmp_path, 8)
    assert "; at the same shares of 1,000 TFLOP/s, under 1 s." in more[0]
    assert "On 8 such GPUs" in more[1] and "too small to keep" in "".join(more)


def test_a_study_of_all_its_domains_has_no_verdicts(ample, tmp_path):
    assert said(ample, tmp_path, "data.train=[prose, notes, code]", "data.ood=[]").endswith("no verdicts.")


def test_documents_count_once_they_are_prepared(ample, tmp_path):
    config = StudyConfig.model_validate(ample)
    unprepared = "Held-out documents are not counted, nor the work of evaluating them, as the text is not prepared"
    assert said(ample, tmp_path).count("documents") == 1 and unprepared in said(ample, tmp_path)
    sets = prepare(config.data, tmp_path / "data").sets
    few = {domain: len(sets[domain, "test"]) for domain in ("notes", "code")}
    assert few["notes"] < 10 and few["code"] < 30
    warned = said(ample, tmp_path)
    assert warned.startswith("Warning: no verdict is possible with so few held-out documents: ")
    assert f"{few['notes']} of notes (needed: 10)" in warned and f"{few['code']} of code (needed: 30)" in warned
    write_text(tmp_path / "more", documents=500, words=20)
    ample["data"]["path"] = str(tmp_path / "more")
    prepare(StudyConfig.model_validate(ample).data, tmp_path / "data")
    assert "documents" not in said(ample, tmp_path)
    for page in [*(tmp_path / "more" / "notes").iterdir()][40:]:
        page.unlink()
    ample["data"] |= {"train": ["prose"], "ood": ["notes", "code"]}
    left = len(prepare(StudyConfig.model_validate(ample).data, tmp_path / "data").sets["notes", "test"])
    warned = said(ample, tmp_path)
    assert f"fewer than 30 held-out documents: {left} of notes; add text." in warned and "Expected" in warned


def test_seeds_that_cost_the_same_are_one_row_and_bytes_have_257_ids(ample):
    config = StudyConfig.model_validate(ample | {"reference_seeds": [0, 1, 2, 5]})
    assert config.vocabulary == (257 if config.text.tokenizer == "bytes" else config.text.vocab)
    rows = estimate(check(config), Path("nowhere"))
    shown = readable(rows)
    assert len(rows) == 3 * len(config.architectures) + 1
    assert [(row["architecture"], row["seeds"]) for row in shown] == [
        (entry.name, "0-2, 5" if entry.name == config.reference else "0-2") for entry in config.architectures
    ]
    left_out = {"seed", "steps", "blocks", "evaluations", "evaluation PFLOP", "resume (GiB)", "weights (GiB)"}
    assert left_out <= rows[0].keys() and not left_out & shown[0].keys()


def test_finished_runs_are_distinguished_from_remaining_ones(ample, tmp_path):
    ample["train"]["lr"] = [0.01, 0.02]
    planned = check(StudyConfig.model_validate(ample | {"seeds": [0, 1]}))
    rows = estimate(planned, tmp_path)
    assert not any("Finished" in line for line in remarks(planned, rows, tmp_path))
    for row in rows:
        rate = None if row["lr"] == "the best" else row["lr"]
        StudyRecords(tmp_path).run(row["architecture"], row["seed"], rate).write_info(run_info())
        last = next(line for line in remarks(planned, rows, tmp_path) if line.startswith(f"Finished in {tmp_path}: "))
    assert f" {len(rows)} of {len(rows)} runs; none is left to train." in last
    timed = run_info(seconds={"start": 1.0, "steps": 17.0, "evaluations": 2.0, "all": 20.0})
    StudyRecords(tmp_path).run(row["architecture"], row["seed"], rate).write_info(timed)
    words = "They spent 85 % of their time in steps, 10 % at evaluation points and 5 % before the second step."
    assert any(line.endswith(f"none is left to train. {words}") for line in remarks(planned, rows, tmp_path))
    StudyRecords(tmp_path).run(row["architecture"], row["seed"], rate).write_info(run_info(status="running"))
    assert f"{len(rows) - 1} of {len(rows)} runs; those left take" in " ".join(remarks(planned, rows, tmp_path))


def test_the_time_counts_evaluations_once_the_text_is_prepared(ample, tmp_path):
    evals = [
        "domain-loss",
        {"copying": {"at": "end", "length": 8}},
        {"selectivity": {"name": "chosen", "task": "mqar"}},
    ]
    config = StudyConfig.model_validate(ample | {"evals": evals})
    planned = check(config)
    before = estimate(planned, tmp_path)
    said = remarks(planned, before, tmp_path)
    assert {row["evaluation PFLOP"] for row in before} == {None}
    assert ", without evaluations, if all reach" in said[0]
    assert any("; the time of evaluations. Architectures" in line for line in said)
    data = prepare(config.data, tmp_path / "data")
    rows = estimate(planned, tmp_path)
    run = planned.runs[0]
    read = sum(data.sets[domain, "test"].sizes.sum() for domain in data.domains)
    copied = planned.evaluations[1].tokens_read(data, run.length)
    assert copied > 0 and copied % 16 == 0
    share = (run.timetable.evaluations * read + copied) / (3 * run.timetable.steps * run.timetable.step_tokens)
    for row, old in zip(rows, before, strict=True):
        assert row["PFLOP"] == old["PFLOP"] and row["evaluation PFLOP"] == pytest.approx(share * row["PFLOP"])
    said = remarks(planned, rows, tmp_path)
    assert f", {100 * share / (1 + share):.0f} % of it for evaluations, if all reach" in said[0]
    assert "Not counted: the work of chosen." in said
    passes = run.timetable.steps * run.timetable.step_tokens / data.train.tokens
    size = f"{data.train.tokens / 1e6:.3g}M"
    assert f"Passes over the training text of {size} tokens: {passes:.2g} a run." in said


def test_evaluations_that_are_more_work_than_training_are_announced(ample, tmp_path, monkeypatch):
    data = prepare(StudyConfig.model_validate(ample).data, tmp_path / "data")
    sizes = np.concatenate([data.sets[domain, "test"].sizes for domain in data.domains])

    def announced(said: Callable, tokens: int, **options: object) -> list[str]:
        train = ample["train"] | {"tokens": tokens, "eval_every": tokens // 20}
        config = StudyConfig.model_validate(ample | {"train": train, "evals": [{"domain-loss": options}]})
        return said(plan_runs(config, config.vocabulary), plan_evaluations(config), {None: data})

    length = 20 * ample["train"]["batch"] * ample["data"]["seq_len"]
    (few,) = announced(evaluation_work, length)
    assert few.startswith(f"Evaluations: domain-loss reads {sizes.sum():,} tokens at 20 evaluation points of a run")
    assert f"about {sizes.sum() * 20 / length / 3:.2g} times the work of training; lower data.max_test_tokens" in few
    assert announced(heavy_work, length) == [] and "lower" not in announced(evaluation_work, 1000 * length)[0]
    monkeypatch.setattr("basecap.plan.evaluation_work.MANY", 20 * sizes.sum())
    assert announced(heavy_work, length) == [few] and announced(heavy_work, 1000 * length) == []
    (once,) = announced(evaluation_work, length, at="end", max_document_tokens=5)
    assert f"reads {np.minimum(sizes, 5).sum():,} tokens at 1 evaluation point of a run," in once
    (little,) = announced(evaluation_work, 1000 * length, at="end", max_document_tokens=5)
    assert little.endswith("at 1 evaluation point of a run, less than 0.001 times the work of training.")


def test_the_work_of_all_evaluations_is_printed_where_it_is_known(ample, tmp_path):
    data = prepare(StudyConfig.model_validate(ample).data, tmp_path / "data")
    evals = [
        {"copying": {"length": 4, "documents": 3}},
        {"position-loss": {"length": 8, "documents": 2}},
        {"influence-entropy": {"windows": 2, "length": 8}},
        "influence-map",
        {"selectivity": {"name": "chosen", "task": "mqar"}},
    ]
    evaluations = plan_evaluations(StudyConfig.model_validate(ample | {"evals": evals}))
    domains = len(data.domains)
    first = min(len(data.documents("test", data.train_domains[0]).tokens(0)), ample["data"]["seq_len"])
    read = [found.tokens_read(data, ample["data"]["seq_len"]) for found in evaluations]
    assert read == [domains * 3 * 2 * 4, domains * 2 * 8, domains * 2 * 8, first, None]
    config = StudyConfig.model_validate(ample | {"evals": evals})
    said = evaluation_work(plan_runs(config, config.vocabulary), evaluations, {None: data})
    assert len(said) == 5 and said[-1] == "Not counted: the work of chosen."


def test_the_work_of_recall_counts_every_cell():
    config = load_study("lp-table-1", ["task.held_out=3", "evals=[recall]"], "laptop")
    (found,) = plan_evaluations(config)
    tasks = Tasks(config.task).workloads()
    own = next(iter(tasks.values()))
    cells = [cell for cells in (own.cells, *own.tests.values()) for cell in cells]
    assert found.tokens_read(own, config.length) == sum(own.held_out("test", cell).inputs.size for cell in cells)
    (said,) = evaluation_work(plan_runs(config, config.vocabulary), [found], tasks)
    assert said.startswith("Evaluations: recall reads ")

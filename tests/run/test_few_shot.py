"""The evaluation few-shot in a study: scores at the end of training, on stored weights, and in the report."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from basecap.analysis import analyse
from basecap.data.tokenizer import byte_tokenizer
from basecap.errors import ConfigError
from basecap.evals import Context
from basecap.evals._few_shot.scoring import Scorer
from basecap.plan.checks import check
from basecap.records import RunRecords, StudyRecords
from basecap.report import write_report
from basecap.report.scores import score_table
from basecap.report.table_rows import measured_on
from basecap.report.text_summary import mixed_data_text
from basecap.run.continue_text import continue_text
from basecap.study.config import load_study
from basecap.train.checkpoint import load_stored, stored
from tests.evals.test_few_shot import metrics, plain, request, write_choices, write_task
from tests.run._execute import run
from tests.run.test_stored_weights import add

pytest.importorskip("lm_eval")

PROMPT = "the river "


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two tasks: the answers of a choice, and a greedy answer of one word."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "tasks"
    write_choices(place, count=9, fewshot_split="test")
    keys = {"doc_to_text": "{{text}}", "doc_to_target": "{{value}}", "output_type": "generate_until"}
    options = {"generation_kwargs": {"until": [" "], "max_gen_toks": 8}, "metric_list": metrics("exact_match")}
    write_task(place, "word", [{"text": PROMPT, "value": "stone"}], **keys, **options)
    return place


def scores_of(records: RunRecords) -> dict[tuple[str, str], float]:
    return {(found.subset, found.metric): found.value for found in records.evals() if found.eval == "few-shot"}


def by_hand(records: RunRecords, rows: list[dict]) -> tuple[list[bool], list[bool]]:
    """Return which answers are right by their log-probabilities, and by these per character."""
    (_, path) = max(stored(records.weights).items())
    model, encode = load_stored(path), byte_tokenizer().encode
    right, normalised = [], []
    for row in rows:
        found = [plain(model, encode(row["question"]), encode(f" {option}"))[0] for option in row["options"]]
        per_character = np.divide(found, [len(option) for option in row["options"]])
        right.append(bool(np.argmax(found) == row["answer"]))
        normalised.append(bool(np.argmax(per_character) == row["answer"]))
    return right, normalised


def test_scores_are_those_by_hand_and_stand_beside_the_published_ones(study, tasks, tmp_path):
    study["architectures"] = ["transformer++"]
    study["evals"] = ["domain-loss", {"few-shot": {"tasks": ["choices", "word"], "path": str(tasks)}}]
    study["figure"] = {
        "kind": "scores",
        "columns": ["choices", "other", "mean"],
        "measured": ["choices acc", None, "mean"],
        "published": {"source": "a paper", "values": {"transformer++": [40.5, 1, 40.5]}},
    }
    path, rows = tmp_path / "scored.yaml", write_choices(tmp_path / "again", count=9)
    path.write_text(yaml.safe_dump(study))
    run(path, tmp_path / "out")
    records = StudyRecords(tmp_path / "out").runs()[0]
    right, normalised = by_hand(records, rows)
    scores = scores_of(records)
    assert scores.pop(("word", "exact_match")) in (0.0, 1.0)
    assert scores == pytest.approx({("choices", "acc"): np.mean(right), ("choices", "acc_norm"): np.mean(normalised)})
    assert {found.step for found in records.evals() if found.eval == "few-shot"} == {10}

    page = write_report([tmp_path / "out"], tmp_path / "out").page.read_text(encoding="utf-8")
    (found,) = analyse([tmp_path / "out"])
    table = score_table(found)
    (row,) = table.rows
    first, other, mean = row.measured
    assert other is None and first == mean and first.value == pytest.approx(100 * np.mean(right))
    assert first.stderr == pytest.approx(100 * np.std(right, ddof=1) / math.sqrt(9))
    assert f"<b>{first.value:.2f}</b> ± {first.stderr:.2f}<br>40.50</td>" in page and "few-shot: all numbers" in page

    data = r"json {.*/choices.jsonl&#39;}, 9 documents, 0-shot, SHA-256 [0-9a-f]{16}, lm_eval [0-9.]+"
    assert re.search(f'<td>choices</td><td>{data}</td><td class="n">1</td>', page)
    assert "acc (share, higher is better)</td>" in page and "Not measured on the same data" not in page


def test_a_finished_study_gains_scores_and_keeps_those_it_has(study, tasks, tmp_path):
    study["data"]["seq_len"] = 64
    study["architectures"] = ["transformer++"]
    study["evals"] = ["domain-loss"]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    run(path, tmp_path / "out")
    assert add(tmp_path / "out", f"few-shot: {{tasks: [choices], path: '{tasks}'}}")[0] == 0
    records = StudyRecords(tmp_path / "out").runs()[0]
    held = (records.path / "evals.jsonl").read_bytes()
    more = f"few-shot: {{tasks: [word, choices], shots: {{choices: 1}}, path: '{tasks}'"
    with pytest.raises(
        ConfigError, match=r"other options \(tasks is .*give yours another name: few-shot: \{name: NAME"
    ):
        add(tmp_path / "out", more + "}")
    failed, said = add(tmp_path / "out", more + ", name: more}")
    assert failed == 0 and said == ["more ran on the weights of 1 evaluation point; the report has its numbers."]
    after = (records.path / "evals.jsonl").read_bytes()
    assert after.startswith(held) and b'"few-shot"' not in after[len(held) :]
    found = {(row.eval, row.subset, row.metric): row for row in records.evals()}
    assert "9 documents, 0-shot" in found["few-shot", "choices", "acc"].data
    assert "9 documents, 1-shot" in found["more", "choices", "acc"].data
    assert found["more", "word", "exact_match"].unit == "share"
    assert [*StudyRecords(tmp_path / "out").declarations()] == ["domain-loss", "few-shot", "more"]
    page = write_report([tmp_path / "out"], tmp_path / "out").page.read_text(encoding="utf-8")
    assert "more: all numbers" in page and "few-shot: all numbers" in page


def test_a_score_on_other_questions_has_its_own_row(study, tasks, tmp_path):
    study["architectures"] = ["transformer++"]
    study["seeds"] = [0, 1]
    study["evals"] = ["domain-loss", {"few-shot": {"tasks": ["choices"], "path": str(tasks)}}]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    run(path, tmp_path / "out")
    (found,) = analyse([tmp_path / "out"])
    assert mixed_data_text(found) == [] and [row.runs for row in measured_on(found)] == [2]
    records = StudyRecords(tmp_path / "out").runs()[1]
    rows = (records.path / "evals.jsonl").read_text()
    (records.path / "evals.jsonl").write_text(rows.replace("SHA-256 ", "SHA-256 0"))
    (found,) = analyse([tmp_path / "out"])
    said = 'Not measured on the same data in all runs, see "How it was run": choices of few-shot.'
    assert mixed_data_text(found) == [said] and [row.runs for row in measured_on(found)] == [1, 1]


def test_answers_are_what_generate_prints(study, tmp_path):
    from basecap.evals._few_shot.library import AskedModel

    study["architectures"] = ["transformer++"]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study))
    run(path, tmp_path / "out")
    records = StudyRecords(tmp_path / "out").runs()[0]
    options = {"temperature": 0.0, "top_k": None, "seed": 0, "device": "cpu", "stops": [" "]}
    (found,) = continue_text(records.path, [PROMPT], 8, **options)
    model = load_stored(max(stored(records.weights).items())[1])
    context = Context(data=None, device=torch.device("cpu"), autocast=torch.no_grad)
    scorer = Scorer(model=model, context=context, tokens_per_batch=64)
    asked = request(PROMPT, {"until": [" "], "max_gen_toks": 8})
    assert AskedModel(byte_tokenizer(), 32, scorer).generate_until([asked]) == [found.text]


def test_a_task_that_cannot_be_asked_is_refused_before_training(study, tasks, tmp_path):
    path, options = tmp_path / "wrong.yaml", {"tasks": ["choice"], "path": str(tasks)}
    path.write_text(yaml.safe_dump({**study, "evals": [{"few-shot": options}]}))
    for command in (lambda: check(load_study(path)), lambda: run(path, tmp_path / "out")):
        with pytest.raises(ConfigError, match="did you mean 'choices'"):
            command()
    assert not (tmp_path / "out").exists()  # not even text was prepared
    path.write_text(yaml.safe_dump({**study, "architectures": ["transformer++"]}))
    StudyRecords(tmp_path / "held").create(load_study(path).model_dump(mode="json"))
    with pytest.raises(ConfigError, match="did you mean 'choices'"):
        add(tmp_path / "held", f"few-shot: {yaml.safe_dump(options, default_flow_style=True)}")

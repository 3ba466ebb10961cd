"""The quickstart: short enough for a first run, too young for verdicts, and its report says so."""

import json
from pathlib import Path

import yaml

from basecap.analysis import analyse
from basecap.plan.runs import plan_runs
from basecap.report import write_report
from basecap.report.summary import summarise
from basecap.report.text_summary import YOUNG
from basecap.study.config import load_study
from tests.report.synthetic import write_study

RECORDS = Path(__file__).parents[2] / "results" / "quickstart"


def test_it_is_designed_on_seeds_that_it_does_not_use():
    study = load_study("quickstart")
    tried = {
        run["seed"]
        for name in ("search", "controls", "canon")
        for run in json.loads((RECORDS / f"{name}.json").read_text())["runs"]
    }
    runs = plan_runs(study, study.vocabulary)
    assert tried and not tried & {run.seed for run in runs}
    assert sum(run.train.tokens for run in runs) <= 16 * 500_000


def test_no_model_of_the_search_is_past_its_transition_in_time():
    """Where copying passes 10 %, it takes five times the tokens; with Canon layers it begins after the quickstart's."""
    budget = load_study("quickstart").train.tokens
    found = json.loads((RECORDS / "search.json").read_text())["runs"]
    after = [run["copies_10_percent_after"] for run in found if run["copies_10_percent_after"]]
    assert len(found) == 16 and after and min(after) >= 5 * budget
    canon = json.loads((RECORDS / "canon.json").read_text())["runs"]
    assert [run["copies_10_percent_after"] for run in canon] == [None] * 3
    assert min(run["copies_2_percent_after"] or run["tokens"] for run in canon) > budget


def test_every_run_of_its_control_was_worse_than_all_other_candidates():
    (control,) = (entry for entry in load_study("quickstart").architectures if entry.control)
    found = [run for run in json.loads((RECORDS / "controls.json").read_text())["runs"] if run["gap"] is not None]
    own = [run for run in found if run["name"] == control.name]
    others = [run for run in found if control.name not in run["name"]]
    assert len({run["seed"] for run in own}) == 4 and len(others) == 13
    assert min(run["gap_low"] for run in own) > max(run["gap_high"] for run in others)


def test_a_table_that_is_too_young_explains_itself_beside_its_control(tmp_path):
    write_study(tmp_path, architectures={"base": (1.0, 0.0), "worse": (1.0, 0.1)}, documents=60, seeds=(0, 1))
    path = tmp_path / "study.yaml"
    content = yaml.safe_load(path.read_text())
    content["architectures"][1]["control"] = True
    path.write_text(yaml.safe_dump(content))
    for evals in tmp_path.glob("runs/*/evals.jsonl"):
        rows = map(json.loads, evals.read_text().splitlines())
        young = (row | {"value": 0.01} if row["metric"] == "copying" else row for row in rows)
        evals.write_text("".join(f"{json.dumps(row)}\n" for row in young))
    (study,) = analyse([tmp_path])
    assert [row.verdict for row in study.comparisons] == ["maturity unknown"]
    said = summarise(study).reasons
    assert YOUNG in said[0] and said[0].endswith("at this age, worse is worse out of domain.")
    assert said[1].startswith("Control: worse must be worse. Its gap of +0.")
    page = write_report([tmp_path], tmp_path).page.read_text()
    assert YOUNG in page and "as it has to: this study sees a loss" in page

"""docs/results.md names every key of results.json."""

import json
import re
from dataclasses import replace
from pathlib import Path

from basecap.analysis import analyse
from basecap.analysis.joined import join
from basecap.analysis.results import to_json
from basecap.records import StudyRecords, Sweep
from basecap.system.files import SCHEMA
from tests.records.made_up import record, run_info
from tests.report.synthetic import write_study
from tests.report.test_task_report import PUBLISHED, task_study

PAGE = Path(__file__).parents[2] / "docs/results.md"
#: What stands under these keys is named by the study, not by basecap.
FOREIGN = {"settings", "environment", "axis", "values", "by_run"}


def keys_of(content, inside=""):
    if isinstance(content, list):
        for member in content:
            yield from keys_of(member, inside)
    elif isinstance(content, dict):
        for key, member in content.items():
            if not (inside == "domains" and isinstance(member, dict)):  # the losses of a point, by domain
                yield key
            if key not in FOREIGN:
                yield from keys_of(member, key)


def test_every_key_is_documented_and_every_documented_key_is_there(tmp_path):
    text = write_study(tmp_path / "text", architectures={"base": (1.0, 0.0), "other": (1.0, 0.05)}, seeds=(0, 1, 2),
                       documents=60, ood=["github"], more_evaluations=True)  # fmt: skip
    text.write_sweeps([Sweep(name="base", seed=0, split="odd", rates=(0.1, 0.2), losses=(3.0, 4.0), chosen=0.1)])
    text.write_looks({"most": 5, "looks": [3], "behind": []})
    text.write_environment({**text.environment(), "overlap": [{"domain": "github", "share": 0.1, "left_out": 2}]})
    run = text.run("other", 2)
    run.write_info(replace(run.info(), status="failed", message="out of memory"))
    (elsewhere,) = text.imported("elsewhere")
    origin = {"folder": "elsewhere", "weights": "0" * 16, "tokenizer": "own"}
    elsewhere.write_info(run_info("elsewhere", status="imported", origin=origin))
    elsewhere.append_evals([record(), record(eval="copying", metric="copying")])
    tasks = task_study(tmp_path / "tasks", architectures=("leaning",), regions={"b": (0.7, 0.1)}, published=PUBLISHED)
    records = StudyRecords(tmp_path)
    by_hand = write_study(tmp_path / "by hand", architectures={"base": (1.0, 0.0), "other": (1.0, 0.05)}, seeds=(0, 1),
                          documents=60)  # fmt: skip
    by_hand.create(by_hand.study() | {"seeds": [0]})
    studies = analyse([text.path, tasks.path, by_hand.path])
    records.write_results(to_json(studies) | {"joined": join(studies[:1], ["text"])})
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["schema"] == SCHEMA and f"now {SCHEMA}." in PAGE.read_text()
    found = set(keys_of(results))
    documented = set(re.findall(r"`([a-z_]+)`", PAGE.read_text())) - {"null"}
    assert found - documented == set(), "in results.json and not in docs/results.md"
    assert documented - found <= {"axis", "seconds"}, "in docs/results.md and not in results.json"

"""The examples of docs/text.md: a study of JSON records, an evaluation and a source."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from basecap.analysis import analyse
from basecap.cli import app
from basecap.evals import build_evaluation
from basecap.records import StudyRecords
from basecap.report.scores import score_table
from tests.evals._context import make_context, make_model
from tests.small_study import write_text

PAGE = (Path(__file__).parents[2] / "docs/text.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """Return the example that begins with `start`."""
    (found,) = re.findall(rf"```\w*\n({re.escape(start)}.*?)```", PAGE, flags=re.DOTALL)
    return found


def records_of(folder: Path) -> list[dict[str, str]]:
    """Return the text files of a folder as records of ten sites."""
    return [{"text": path.read_text(), "site": path.stem[-1]} for path in sorted(folder.iterdir())]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Return the study of the page, in small, with its text in place and its plugins written."""
    monkeypatch.chdir(tmp_path)
    written = write_text(tmp_path / "written")
    (tmp_path / "text").mkdir()
    for domain, folder in (("web", "prose"), ("books", "notes"), ("code", "code")):
        rows = records_of(written / folder)
        (tmp_path / f"text/{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (tmp_path / f"text/{domain}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, ["text", "site"])
            table.writeheader()
            table.writerows(rows)
    for name in ("top_token.py", "csv_files.py"):
        Path(name).write_text(block(f"# {name}\n"))
    study = yaml.safe_load(block("name: mine\n"))
    assert study["architectures"] == ["transformer++", "rwkv-7"]
    small = {
        "seeds": [0],
        "train": study["train"] | {"tokens": 512},
        "model": {"hidden": 16, "layers": 1},
        "architectures": ["transformer++"],
    }
    return study | small | {"data": study["data"] | {"workers": 1}}


def basecap(*arguments: str) -> str:
    """Return what a command prints."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_study_and_the_evaluation_of_the_page_run(own, tmp_path):
    own["evals"].append({"top-token": {"documents": 3, "at": "end"}})
    own["figure"] = {"kind": "scores", "columns": ["web", "code"], "measured": ["web right", "top-token code right"]}
    Path("mine.yaml").write_text(yaml.safe_dump(own))
    plugin = ("--plugin", "top_token.py", "--out", "jsonl")
    basecap("run", "mine.yaml", *plugin, "--device", "cpu")
    found = [row for row in StudyRecords(tmp_path / "jsonl").runs()[0].evals() if row.eval == "top-token"]
    assert [row.subset for row in found] == ["web", "books", "code"]
    assert all(0 <= row.value <= 1 and row.n > 100 for row in found)
    records = StudyRecords(tmp_path / "jsonl")
    held = records.environment()
    assert held["plugins"] == {"evaluation": {"top-token": "top_token.py"}}
    records.write_environment({key: value for key, value in held.items() if key != "plugins"})
    basecap("eval", "jsonl", *plugin[:2], "--add", "{top-token: {name: more, documents: 2, at: end}}")
    assert records.environment() == held

    read = sum(row.n for row in found)
    said = " ".join(basecap("plan", "mine.yaml", *plugin).split())
    assert f"Evaluations: top-token reads {read:,} tokens at 1 evaluation point of a run, about " in said

    page = Path("jsonl/report.html").read_text(encoding="utf-8")
    (row,) = score_table(analyse([Path("jsonl")])[0]).rows
    assert [score.value for score in row.measured] == [100 * found[0].value, 100 * found[2].value]
    assert "<h2>Scores</h2>" in page and f"<b>{100 * found[0].value:.2f}</b></td>" in page

    context, evaluation = make_context(tmp_path / "context"), build_evaluation("top-token")
    model = make_model(context)
    alone = evaluation.run(model, context).measurements
    parts = [evaluation.run(model, replace(context, rank=rank, world=2)) for rank in (0, 1)]
    assert [len(part.measurements) for part in parts] == [1, 1] and evaluation.join(parts).measurements == alone


def test_the_source_of_the_page_reads_the_same_text(own):
    printed = {}
    for name in ("jsonl", "csv"):
        own["data"]["source"] = name
        Path(f"{name}.yaml").write_text(yaml.safe_dump(own))
        options = ["--plugin", "csv_files.py", "--set", f"data.cache=cache-{name}", "--json"]
        done = CliRunner().invoke(app, ["data", "inspect", f"{name}.yaml", *options])
        assert done.exit_code == 0, done.output
        printed[name] = json.loads(done.stdout)
    assert printed["csv"] == printed["jsonl"]
    assert all(
        row["clusters"] <= 10 and row["without cluster"] == 0 for row in printed["csv"] if row["split"] == "test"
    )

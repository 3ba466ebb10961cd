"""The command line as a newcomer meets it: answers on stdout, one sentence and exit code 2 for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from basecap.cli import main
from tests.study.conftest import study, study_file  # noqa: F401 (fixtures)
from tests.study.test_execute import PLUGIN


def basecap(*arguments: str | bytes | Path, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "basecap.cli",
        *(part if isinstance(part, bytes) else str(part) for part in arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=250, check=False)


def refused(*arguments: str | bytes | Path) -> str:
    """Run bad input; return the sentence on stderr."""
    done = basecap(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_run_report_generate(study_file, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    done = basecap("run", study_file, "--out", out, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "window 4" in done.stdout and "report.html" in done.stdout
    page = (out / "report.html").read_text()
    assert "window 4" in page and "<script" in page
    assert json.loads((out / "results.json").read_text())["schema"] == 1

    again = basecap("report", out)
    assert again.returncode == 0 and "report.html" in again.stdout

    run = out / "runs" / "transformer++-s0"
    texts = [basecap("generate", run, "the river", "--tokens", 8, "--seed", seed) for seed in (1, 1, 2)]
    assert all(text.returncode == 0 for text in texts), texts[0].stderr
    assert texts[0].stdout == texts[1].stdout != texts[2].stdout
    assert texts[0].stdout.startswith("the river")

    assert "transformer++-s0" in refused("generate", out, "the")
    assert "--seed" in basecap("generate", run, "the", "--seed", "9" * 23).stderr
    kept = (out / "study.yaml").read_text()
    (out / "study.yaml").write_text("schema: 1\nname: tiny\n")
    assert "study.yaml: 'data' is missing" in refused("generate", run, "the")
    (out / "study.yaml").write_text(kept)
    weights = next(run.glob("checkpoints/*/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    assert "unreadable" in refused("generate", run, "the")


def test_a_failed_run_shows_in_the_exit_code(study, tmp_path):  # noqa: F811
    plugin, path = tmp_path / "breaks.py", tmp_path / "tiny.yaml"
    plugin.write_text(PLUGIN)
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "breaks"]}))
    done = basecap("run", path, "--out", tmp_path / "out", "--device", "cpu", "--plugin", plugin)
    assert done.returncode == 1
    assert "failed: breaks; the reasons" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "out" / "report.html").exists()


def test_plan_and_lists_answer_without_writing(study_file, tmp_path):  # noqa: F811
    done = basecap("plan", study_file, "--json", cwd=tmp_path)
    rows = json.loads(done.stdout)
    assert [row["architecture"] for row in rows] == ["transformer++", "window 4"]
    assert rows[0]["parameters (M)"] > 0 and rows[0]["hours here"] > 0
    for what in ("mixers", "backbones", "studies", "evals", "domains", "settings"):
        listed = basecap("list", what, "--json")
        assert listed.returncode == 0, listed.stderr
        assert json.loads(listed.stdout)
    assert not (tmp_path / "runs").exists()


def test_data_inspect_counts_every_domain(study_file, tmp_path):  # noqa: F811
    done = basecap("data", "inspect", study_file, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["domain"] for row in json.loads(done.stdout)} == {"prose", "notes", "code"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "quikstart"), "quickstart"),
        (("plan", "none.yaml"), "does not exist"),
        (("list", "mixer"), "mixers"),
        (("run", "quickstart", "--only", "mamba-3"), "mamba-2"),
        (("run", "quickstart", "--set", "train.tokns=1"), "tokens"),
        (("run", "quickstart", "--plugin", "none.py"), "does not exist"),
        (("run", "quickstart", "--device", "tpu0"), "device"),
        (("report", "nowhere"), "study"),
        (("run", "quickstart", "--device", "meta"), "unknown device"),
        (("generate", "nowhere", b"\xff"), "not text in UTF-8"),
        (("bench", "ops", "--device", "cpu"), "bench ops needs a CUDA GPU"),
        (("report", __file__), "is a file; give a directory"),
        (("run", "quickstart", "--out", __file__), "is a file; give a directory"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, words):
    assert words in refused(*arguments)


@pytest.mark.parametrize(
    ("command", "place"),
    [(["run"], "basecap.study.execute.execute"), (["data", "inspect"], "basecap.study.execute.data_of")],
)
def test_an_interruption_says_how_to_go_on(command, place, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    monkeypatch.setattr(sys, "argv", ["basecap", *command, "quickstart", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to resume.\n"


def test_help_has_an_example():
    for command in (["run"], ["plan"], ["report"], ["list"], ["generate"], ["data", "prepare"], ["data", "inspect"]):
        done = basecap(*command, "--help")
        assert done.returncode == 0 and f"basecap {' '.join(command)}" in done.stdout.replace("\n", " ")

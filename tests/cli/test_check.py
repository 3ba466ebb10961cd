"""`basecap check` on the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from basecap.cli import app
from basecap.errors import ConfigError
from basecap.ops import _dispatch, choose
from basecap.testing import check_all
from basecap.testing.new_mixer import write_mixer

PLUGIN = """
from basecap.mixers import mixer
from basecap.mixers.attention import Attention

@mixer("of a file", backbone="gpt", paper="none", summary="none")
class OfAFile(Attention):
    pass
"""


def rows(name: str, device: torch.device, longest: int) -> list[dict]:
    if name == "mamba-2":
        raise KeyboardInterrupt
    result = "it errs" if name == "rwkv-7" else "passed"
    return [{"subject": name, "check": "runs", "error": 0.0, "allowed": 0.0, "result": result}]


def test_an_interrupted_check_shows_what_it_has_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_all, "_mixer_rows", rows)
    command = [
        "check",
        "--thorough",
        "--device",
        "cpu",
        *(f"--mixer={name}" for name in ("mamba-1", "mamba-2", "rwkv-7")),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 130
    assert "mamba-1" in done.output
    covered = "on 2 rows of 147 tokens, normal inputs, float64, float32, bfloat16, layer index 0; "
    assert f"1 check, 0 failed; mixers were checked {covered}" in done.output
    assert "causality and decoding also on 1 row of 1,100 tokens, layer index 1." in done.output
    assert "interrupted" in done.output
    assert "rwkv-7" not in done.output


def test_passes_are_one_row_and_failures_come_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_all, "_mixer_rows", lambda *arguments: rows(*arguments) * 3)
    done = CliRunner().invoke(app, ["check", "--device", "cpu", "--mixer=rwkv-7", "--mixer=mamba-1"])
    table = done.stdout.splitlines()[2:]
    assert done.exit_code == 1
    assert "(--thorough adds 1 row of 1,100 tokens, layer index 1 and the kernels for CPUs)." in done.output
    assert table[0].split() == ["mamba-1", "3", "checks", "–", "–", "passed"]
    assert len(table) == 4 and all(line.startswith("rwkv-7 ") and line.endswith("it errs") for line in table[1:])


def test_mixers_compile_kernels_for_the_cpu_only_if_thorough(monkeypatch: pytest.MonkeyPatch):
    families = {name: SimpleNamespace(RUNS=name, BACKEND=name, supports=lambda x: None) for name in ("numba", "eager")}
    ran = []

    def check_mixer(*given: object, **options: object) -> SimpleNamespace:
        ran.extend(choose("an op", backend, families, torch.ones(1)) for backend in ("auto", "numba"))
        return SimpleNamespace(checks=[])

    monkeypatch.setattr(check_all, "check_mixer", check_mixer)
    with monkeypatch.context() as outside:
        outside.setattr(_dispatch, "_left_out", [])
        for longest in (0, check_all.LONGEST):
            check_all.check_all(["hyena"], torch.device("cpu"), lambda rows: list(rows), longest=longest)
    assert ran == ["eager", "numba", "numba", "numba"]


def test_a_plugin_that_ends_the_process_has_proved_nothing(tmp_path: Path):
    plugin = tmp_path / "ends.py"
    plugin.write_text("import os\nos._exit(0)\n")
    command = [sys.executable, "-m", "basecap", "check", "--plugin", str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = "error: a plugin ended the process before its checks were done, as os._exit does; nothing is proved.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_failures_alone_are_printed_when_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_all, "_mixer_rows", rows)
    command = ["check", "--device", "cpu", "--failed", "--mixer=mamba-1"]
    done = CliRunner().invoke(app, [*command, "--mixer=rwkv-7"])
    assert done.exit_code == 1 and "it errs" in done.stdout and "mamba-1" not in done.stdout
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout) == (0, "") and "1 check, 0 failed" in done.output


def test_the_mixers_of_a_plugin_file_are_checked_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(check_all, "_mixer_rows", rows)
    plugin = tmp_path / "checked_plugin.py"
    plugin.write_text(PLUGIN)
    done = CliRunner().invoke(app, ["check", "--device", "cpu", "--plugin", str(plugin), "--json"])
    assert [row["subject"] for row in json.loads(done.stdout)] == ["of a file"]


def test_new_writes_a_mixer_and_checks_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(check_all, "_mixer_rows", rows)
    file = tmp_path / "of_check_new.py"
    done = CliRunner().invoke(app, ["check", "--device", "cpu", "--new", str(file), "--json"])
    assert [row["subject"] for row in json.loads(done.stdout)] == ["of-check-new"]
    assert f"basecap check --plugin {file}" in done.stderr
    assert "class OfCheckNew(ForwardOnly):" in file.read_text()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("mamba_2.py", "there is a mixer 'mamba-2' already; choose another name."),
        ("here.py", "exists; choose another name."),
        ("gone/my_mixer.py", "cannot be written (No such file or directory); choose another place."),
        *(
            (name, "must be lower case with underscores and end in .py, such as my_mixer.py.")
            for name in ("My.py", "a__b.py", "a.txt")
        ),
    ],
)
def test_new_refuses_what_would_make_no_mixer(tmp_path: Path, file: str, words: str):
    (tmp_path / "here.py").write_text("kept")
    with pytest.raises(ConfigError, match=re.escape(words)):
        write_mixer(tmp_path / file)
    assert (tmp_path / "here.py").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1

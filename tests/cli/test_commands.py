"""The command line as a newcomer meets it: answers on stdout, one sentence and exit code 2 for bad input."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console

from basecap.cli import main
from basecap.cli import output as terminal
from basecap.cli.output import store, writable_file
from basecap.cli.usage import usage_message
from basecap.errors import ConfigError, DataError
from basecap.report.bundle import _made, label
from tests import forks
from tests.report.synthetic import write_study
from tests.run._execute import PLUGIN

#: Exit code, stdout, stderr.
Answer = tuple[int, str, str]


def in_a_process(*arguments: object) -> Answer:
    """Run the command line as a user does, in a process of its own."""
    command = [sys.executable, "-m", "basecap", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)
    return done.returncode, done.stdout, done.stderr


def forked(output: Path, *arguments: object) -> tuple[int, str]:
    """Run the command line in a fork of a process that has imported everything; return the exit code and all output."""
    process = forks.start(forks.command, *arguments, output=output, COLUMNS="200")
    process.join(250)
    return process.exitcode, output.read_text()


@pytest.fixture
def basecap(monkeypatch, capsys) -> Callable[..., Answer]:
    """Run the command line in this process, which spares importing torch again."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["basecap", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def refused(basecap) -> Callable[..., str]:
    """Run bad input; return the sentence on stderr."""

    def call(*arguments: object) -> str:
        code, _, err = basecap(*arguments)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1, err
        return lines[0]

    return call


def test_run_report_generate(study_file, tmp_path, basecap, refused):
    out = tmp_path / "out"
    code, printed, err = in_a_process("run", study_file, "--out", out, "--device", "cpu")
    assert code == 0, err
    assert "Nothing can be compared with transformer++ yet" in printed and "report.html" in printed
    page = (out / "report.html").read_text()
    assert "window 4" in page and "<script" in page
    assert json.loads((out / "results.json").read_text())["schema"] == 1

    code, printed, _ = basecap("report", out)
    assert code == 0 and "report.html" in printed
    code, printed, err = basecap(
        "eval", out, "--add", "influence-entropy: {length: 16}", "--at", "end", "--device", "cpu"
    )
    assert code == 0 and err.startswith("influence-entropy ran on") and "report.html" in printed
    found = {row["name"]: row for row in json.loads((out / "results.json").read_text())["studies"][0]["evaluations"]}
    table = printed.partition("influence-entropy: ")[2]
    assert all(column in table for column in ("architecture", "runs", "subset", "layer", "entropy"))
    assert all(f"{row['value']:.4g}" in table for row in found["influence-entropy"]["rows"])
    assert "did you mean 'influence-entropy'?" in refused("eval", out, "--add", "influence-entrpy")

    run = out / "runs" / "transformer++-s0"
    answers = [basecap("generate", run, "the river", "--tokens", 8, "--seed", seed) for seed in (1, 2)]
    with contextlib.chdir(run):
        answers.insert(0, basecap("generate", ".", "the river", "--tokens", 8, "--seed", 1))
    assert all(code == 0 for code, *_ in answers), answers
    texts = [printed for _, printed, _ in answers]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the river")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('\ufeff"the river"\n\n{"prompt": "a"}\n')  # as editors of Windows begin a file
    options = ("--prompts", prompts, "--tokens", 8, "--seed", 1, "--json")
    found = json.loads(basecap("generate", run, "of the", *options)[1])
    assert [one["prompt"] for one in found] == ["of the", "the river", "a"]
    assert found[1]["prompt"] + found[1]["text"] + "\n" == texts[0]  # as if it were alone
    letter = found[1]["text"][2]
    cut = json.loads(basecap("generate", run, *options, "--stop", letter)[1])[0]
    assert cut["stopped"] and cut["text"] == found[1]["text"].split(letter)[0]
    assert "no text to continue" in refused("generate", run)
    assert "not text in UTF-8" in refused("generate", run, "\udcff")
    prompts.write_text("[1]")
    assert "prompts.jsonl:1 is no prompt" in refused("generate", run, *options)

    (layer,) = json.loads(basecap("audit", run, "--device", "cpu", "--json")[1])
    assert layer["layer"] == "layer 0, Attention" and layer["visibility"] == 1 and layer["trained"]

    assert "transformer++-s0" in refused("generate", out, "the")
    assert "transformer++-s0" in refused("generate", out / "runs", "the")
    found = basecap("audit", "mamba-1 decay none w/o conv", "--length", 16, "--device", "cpu")[1]  # no directory w
    assert "Mamba1 (decay none, conv False)" in found
    assert "did you mean 'mamba-2'? For one in your own file, add --plugin FILE." in refused("audit", "mamba2")
    assert f"did you mean '{run}'?" in refused("audit", out / "runs" / "transformer-s0")
    assert f"did you mean '{run}'?" in refused("generate", out / "runs" / "transformer-s0")  # before a text is asked
    assert "--seed" in basecap("generate", run, "the", "--seed", "9" * 23)[2]
    kept = (out / "study.yaml").read_text()
    (out / "study.yaml").write_text("schema: 1\nname: tiny\n")
    assert "this has neither; add one" in refused("generate", run, "the")
    (out / "study.yaml").write_text(kept)
    for weights in sorted(run.glob("resume/*/model.safetensors"), reverse=True):
        weights.write_bytes(weights.read_bytes()[:100])
    assert "is damaged (model.safetensors does not match SHA256SUMS); remove" in refused("generate", run, "the")

    next(run.glob("documents/*.losses")).unlink()
    code, printed, err = basecap("run", study_file, "--out", out, "--device", "cpu")
    assert (code, printed) == (2, "") and f"remove {run} to train it again" in err  # said before anything is trained


def test_a_failed_run_shows_in_the_exit_code(study, tmp_path):
    plugin, path = tmp_path / "breaks.py", tmp_path / "tiny.yaml"
    plugin.write_text(PLUGIN)
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "breaks"]}))
    arguments = ("run", path, "--out", tmp_path / "out", "--device", "cpu", "--plugin", plugin, "--allow-unproved")
    code, said = forked(tmp_path / "said", *arguments)
    assert code == 1, said
    assert said.count("stopped being finite") == 1 == said.count("breaks (seed 0) failed: ")
    assert "architectures that failed: 1; the reasons are above" in said and "Traceback" not in said
    assert "plain PyTorch" not in said
    assert (tmp_path / "out" / "report.html").exists()
    code, said = forked(tmp_path / "said", *arguments, "--only", "transformer++")
    assert code == 0, said


def test_plan_and_lists_answer_without_writing(study_file, tmp_path, basecap, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = set(tmp_path.iterdir())
    rows = json.loads(basecap("plan", study_file, "--json")[1])
    assert [row["architecture"] for row in rows] == ["transformer++", "window 4"]
    assert rows[0]["parameters (M)"] > 0 and 0 < rows[0]["hours if all reach 40%"] < rows[0]["hours if all reach 15%"]
    assert rows[0]["weights + optimiser (GiB)"] == pytest.approx(rows[0]["parameters (M)"] * 16e6 / 2**30, rel=0.1)
    lists = json.loads(basecap("list", "--json")[1])
    assert "settings" in [row["list"] for row in lists]
    for row in lists:
        code, printed, err = basecap("list", row["list"], "--json")
        assert code == 0, err
        assert json.loads(printed) and row["summary"]
    assert "width 768, 32,000 token ids" in basecap("list", "mixers")[1]
    assert set(tmp_path.iterdir()) == there


def test_a_plan_says_what_it_leaves_out_and_what_is_missing(study_file, tmp_path, basecap, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, err = basecap("plan", study_file)
    assert code == 0, err
    assert "All 2 runs: " in printed and "Left out: activations" in printed and "Missing" not in printed
    assert "not prepared" in printed and "Evaluations:" not in printed
    assert basecap("data", "prepare", study_file, "--out", "elsewhere")[0] == 0
    found = basecap("plan", study_file, "--out", "elsewhere")[1]
    assert "not prepared" not in found and "Evaluations: domain-loss reads" in found
    code, printed, err = basecap("plan", study_file, "--set", f"data.tokenizer={study_file}")
    assert code == 2 and "All 2 runs: " in printed
    assert err.startswith(f"error: missing: {study_file} is not a valid tokenizer.json")
    assert "network" not in basecap("plan", study_file, "--set", "data.tokenizer=no.json")[1]
    code, _, err = basecap("plan", study_file, "--set", "data.tokenizer=no.json", "--json")
    assert (code, err) == (2, "error: missing: tokenizer no.json does not exist; give the path of a tokenizer.json.\n")
    code, printed, err = basecap("plan", study_file, "--set", "data.ood=[poems]", "--set", "data.tokenizer=some/model")
    assert code == 2 and err.startswith("error: missing: ") and "has no domain 'poems'" in err
    code, _, err = basecap("plan", study_file, "--out", "/dev/full")
    assert (code, err) == (2, "error: missing: /dev/full is not a directory; give another --out.\n")
    code, _, err = basecap("plan", study_file, "--set", f"data.cache={study_file}/text")
    assert (code, err) == (2, f"error: missing: {study_file} is not a directory; give another data.cache.\n")
    remote = "From the network: tokenizer 'some/model' is downloaded from the Hugging Face hub; give a local tokenizer"
    assert remote in printed


def test_a_disk_that_is_too_small_is_said_before_training(study_file, tmp_path, basecap, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 2**20, 2**20))
    sentence = f"the disk of {tmp_path / 'out'} has 1 MiB free, and checkpoints, weights and the report take about "
    assert f"\nWarning: {sentence}" in basecap("plan", study_file, "--out", tmp_path / "out")[1]
    code, _, err = basecap("run", study_file, "--out", tmp_path / "out", "--set", "train.tokens=512")
    assert code == 0 and sentence in err
    assert sentence not in basecap("plan", study_file, "--out", tmp_path / "out")[1]  # nothing is left to train


def test_what_a_report_lacks_does_not_end_a_run_in_a_crash(study_file, tmp_path, basecap, monkeypatch):
    records = write_study(tmp_path / "out", architectures={"base": (1.0, 0.0)}, documents=5, checkpoints=2)
    monkeypatch.setattr("basecap.run.execute.execute", lambda *_, **__: [run.info() for run in records.runs()])
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr("basecap.report.bundle._made", _made.__wrapped__)
    code, printed, err = basecap("run", study_file, "--out", records.path)
    early, late = err.splitlines()
    assert code == 0 and f"report: {records.path / 'report.html'}" in printed, err
    assert early.startswith("Warning: the report will have no charts: charts need the library vl-convert-python, which")
    assert late == early.replace("will have", "has") and late.endswith("; pip install vl-convert-python.")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    code, printed, err = basecap("run", study_file, "--out", records.path)
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"error: cannot write {records.path / 'results.json'}: the disk is full; free disk space or give another "
        f"directory. The runs are stored; `basecap report {records.path}` writes the report."
    )
    monkeypatch.setattr("basecap.report.write_report", Mock(side_effect=ImportError("No module named 'scipy'")))
    code, printed, err = basecap("run", study_file, "--out", records.path)
    assert code == 2 and "(No module named 'scipy'); install it. The runs are stored; `basecap report " in err


def test_a_terminal_that_knows_ascii_alone_is_answered(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, printed, err = in_a_process("list", "settings")
    assert code == 0 and "data.vocab" in printed and "?" in printed, err


def test_data_inspect_counts_every_domain(study_file, tmp_path, basecap):
    code, printed, err = basecap("data", "inspect", study_file, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert {row["domain"] for row in json.loads(printed)} == {"prose", "notes", "code"}


def test_data_inspect_shows_examples_of_a_task(basecap):
    code, printed, err = basecap("data", "inspect", "mqar-k2v2", "--set", "pairs=2", "--examples", "1")
    assert code == 0 and "length 512: pairs 1, 2, 4, 8, 16, 32" in printed and "q1    q1" in printed, err
    (row,) = json.loads(basecap("data", "inspect", "mqar", "--examples", "1", "--json")[1])
    assert len(row["inputs"]) == 64 and row["roles"][:2] == ["key", "value"] and len(row["answers"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "quikstart"), "quickstart"),
        (("plan", "none.yaml"), "does not exist"),
        (("plan", "mamba-2"), "see `basecap list studies`. To train a mixer, run quickstart --only NAME."),
        (("run", "mine.py"), "mine.py is Python, not a study; write for example quickstart --plugin mine.py."),
        (("list", "mixer"), "mixers"),
        (
            ("list", "xyz"),
            "cannot list 'xyz': choose from backbones, domains, evals, mixers, settings, studies, tasks.",
        ),
        (("run", "quickstart", "--only", "bassed"), "based"),
        (("run", "quickstart", "--set", "train.tokns=1"), "tokens"),
        (("run", "quickstart", "--plugin", "none.py"), "does not exist"),
        (("run", "quickstart", "--device", "tpu0"), "device"),
        (("report", "nowhere"), "study"),
        (("run", "quickstart", "--device", "meta"), "unknown device"),
        (("bench", "ops", "--device", "cpu"), "needs a CUDA GPU, not cpu; without one `basecap check`"),
        (("report", __file__), "is a file; give a directory"),
        (("run", "quickstart", "--out", __file__), "is a file; give a directory"),
        (("check", "--length", "5"), "invalid value for '--length': should be "),
        (("run", "quickstart", "--per-device", "none"), "'--per-device'"),
        (("run", "quickstart", "--per-device", "0"), "'0' is not auto or a number from 1 to 64"),
        (("run", "quickstart", "--device", "cpu", "--per-device", "auto"), "auto needs a GPU; on a CPU give a number"),
        (("run", "quickstart", "--device", "cpu", "--executor", "locl"), "did you mean 'local'?"),
        (("run", "quickstart", "--max-seeds", "4"), "--max-seeds limits what --until-decided adds"),
        (("run", "quickstart", "--until-decided"), "add --max-seeds N"),
        (("check", "mamba-2"), "unexpected argument mamba-2; write --mixer NAME (see `basecap check --help`)."),
        (
            ("plan", "quickstart", "rwkv-7"),
            "unexpected argument rwkv-7; write --only NAME (see",
        ),
        (("bench", "ops", "--length", "5"), "(see `basecap bench ops --help`)."),
        (("generate", "nowhere", "the", "--tokens", "9" * 23), "invalid value for '--tokens': "),
        (("bench", "models", "--hidden", "9" * 23), "invalid value for '--hidden': "),
        (("plan", "quickstart", "--set", "seeds=abc"), "each entry should be a whole number."),
        (("run", ""), "error: an argument is empty; give one, or leave it out"),
        (("run", "quickstart", "--out="), "error: the value of --out is empty; give one, or leave it out"),
        (("plan", "quickstart", "--set", "data.seq_len=1"), "data.seq_len = 1: should be greater than or equal to 2."),
        (("plan", "quickstart", "--set", "architectures=[transformer++, mamba2]"), "did you mean 'mamba-2'?"),
        (("list", "MIXERS"), "did you mean 'mixers'?"),
        (("data", "inspect", "mqar-k2v2-shufle"), "did you mean 'mqar-k2v2-shuffle'?"),
        (("data", "inspect", "quikstart"), "unknown study 'quikstart'"),
        (
            ("data", "inspect", "quickstart", "--examples", "3"),
            "--examples are those of a task, and quickstart is none",
        ),
        (("data", "inspect", "mqar", "--set", "pairs=99"), "a length of 64 has room for 16 of 99 pairs"),
        (("data", "inspect", "mqar", "--set", "pairs"), "does not have the form option=value"),
        (("data", "inspect", "mqar", "--plugin", "none.py"), "none.py does not exist"),
        (("data", "prepare", "quickstart", "--plugin", "none.py"), "none.py does not exist"),
        (("data", "inspect", "mqar", "--scale", "test"), "mqar is a task and has no --scale or --out"),
        (("plan", "quickstart", "--only", ""), "error: the value of --only is empty; give one, or leave it out"),
        (("plan", "x" * 300), "x cannot be read (File name too long); fix that"),
        (("run",), "(see `basecap run --help`)."),
        (("data", "inspect", "--set"), "option '--set' requires an argument (see `basecap data inspect --help`)."),
        (("check", "mine.py"), "write --plugin mine.py (see `basecap check --help`)."),
        (("data", "prepar"), "no such command 'prepar'"),
        (("--frob",), "--frob"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, words, refused):
    assert words in refused(*arguments)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "No such command 'rum'. Did you mean 'run'?",
            "no such command 'rum'; did you mean 'run'?",
        ),
        ("No such option: --setx (Possible options: --set)", "no such option: --setx; did you mean --set?"),
        ("No such option: --svg (Possible options: --slurm)", "no such option: --svg; write --figures svg (see"),
        ("", ""),
    ],
)
def test_messages_of_typer_become_one_sentence(given, expected):
    error = SimpleNamespace(format_message=lambda: given, ctx=None)
    found = usage_message(error)
    assert found.startswith(expected) and bool(found) == bool(given)


#: Commands that need no torch, which takes seconds to import.
LIGHT = (
    ["--version"],
    ["list", "studies"],
    ["list", "domains"],
    ["list", "nothing"],
    ["run", "quikstart"],
    ["plan", "quickstart", "--set", "train.tokns=1"],
    ["run", "limited-mini", "--only", "mamba-l"],
    ["data", "inspect", "quikstart"],
    ["data", "inspect", "quickstart", "--out", "here", "--set", "data.source=text"],
    ["check", "--length", "none"],
    ["eval", "nothing"],
    ["eval", "nothing", "--at", "never"],
    ["generate", "nothing", "prompt"],
    ["run", "quickstart", "--device", "tpu"],
    ["run", "quickstart", "--until-decided"],
    ["bench", "models", "--scale", "test"],
)
PROGRAM = f"""
import sys
from basecap.cli import main
codes = []
for arguments in {LIGHT!r}:
    sys.argv = ["basecap", *arguments]
    try:
        main()
    except SystemExit as left:
        codes.append(left.code or 0)
print(codes, {{"torch", "scipy", "vl_convert"}} & set(sys.modules))
"""


def test_lists_and_refusals_do_not_import_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(r"basecap \d+\.\d+\.\d+", first)
    assert last == f"{[0] * 3 + [2] * (len(LIGHT) - 3)} set()", done.stderr


def test_a_report_imports_no_torch_and_draws_nothing_itself(tmp_path):
    """Its page has the scripts of the one before, and a browser draws."""
    write_study(tmp_path, architectures={"base": (1.0, 0.0), "other": (1.0, 0.2)}, documents=40)
    (tmp_path / "report.html").write_text(f'<script data-bundle="{label("draw()")}">draw()</script>')
    program = f"""
import sys
from basecap.cli import main
sys.argv = ["basecap", "report", {str(tmp_path)!r}]
try:
    main()
except SystemExit as left:
    print(left.code or 0, {{"torch", "vl_convert", "multiprocessing"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()", done.stderr


def test_bad_input_leaves_a_process_with_exit_code_2():
    code, printed, err = in_a_process("run", "quikstart")
    assert (code, printed) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


def test_output_that_cannot_be_written_is_one_sentence():
    command = [sys.executable, "-m", "basecap.cli", "list", "settings"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: the disk is full; free disk space and run again.\n")


@pytest.mark.parametrize(
    ("command", "place", "number", "words"),
    [
        (["run"], "basecap.run.execute.execute", signal.SIGINT, "; run the same command again to resume"),
        (
            ["data", "prepare"],
            "basecap.plan.workloads.data_of",
            signal.SIGHUP,
            "; run the same command again to resume",
        ),
        (["plan"], "basecap.plan.checks.check", signal.SIGINT, ""),
    ],
)
def test_an_interruption_says_how_to_go_on(command, place, number, words, tmp_path, monkeypatch, basecap):
    monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(number))
    code, _, err = basecap(*command, "quickstart", "--out", tmp_path / "out")
    assert (code, err) == (128 + number, f"interrupted{words}.\n")


def test_an_interruption_within_an_import_ends_the_command(tmp_path):
    """Libraries may hide it, as PyTorch does in places."""
    (tmp_path / "hides.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    plugin = tmp_path / "imports_hides.py"
    plugin.write_text("import hides\n")
    process = forks.start(_with_ctrl_c, "list", "mixers", "--plugin", plugin, output=tmp_path / "output")
    process.join(60)
    assert (process.exitcode, (tmp_path / "output").read_text()) == (130, "interrupted.\n")


def _with_ctrl_c(*arguments) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forks.command(*arguments)


def test_help_has_an_example(basecap):
    for command in (
        ["run"],
        ["eval"],
        ["plan"],
        ["report"],
        ["list"],
        ["generate"],
        ["data", "prepare"],
        ["data", "inspect"],
    ):
        code, printed, _ = basecap(*command, "--help")
        assert code == 0 and f"basecap {' '.join(command)}" in printed.replace("\n", " ")


@pytest.mark.parametrize("fails", ["open", "replace"])
def test_rows_of_a_benchmark_outlast_a_full_disk(fails, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    store({"rows": [1]}, path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, fails, full)
        with pytest.raises(DataError, match=r"cannot write .*rows\.json: the disk is full; .* file with --json"):
            store({"rows": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"rows": [1]} and list(tmp_path.iterdir()) == [path]


def test_a_benchmark_writes_through_a_link_and_over_no_device(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "rows.json")
    assert writable_file(tmp_path / "link.json") == tmp_path / "rows.json"
    for path in ("/dev/null", "/proc/rows.json"):  # root may write into /proc, by its mode
        with pytest.raises(ConfigError, match=f"{path} cannot be written"):
            writable_file(Path(path))


def test_a_narrow_terminal_breaks_sentences_but_no_number(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "console", lambda: Console(width=40, markup=False))
    rows = [
        {
            "architecture": "transformer++ no position",
            "parameters (M)": 1234.5,
            "PFLOP": 0.0004186,
            "time": "10 s to 26 s",
        }
    ]
    terminal.print_table("plan", rows, as_json=False)
    printed = capsys.readouterr().out
    assert "transformer++ no position" in printed and "1,234" in printed and "0.0004186" in printed
    assert "10 s to 26 s" not in printed and "parameters" in printed

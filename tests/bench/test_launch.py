"""The table of launches has every op, the worst first, and only what was measured."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import basecap.ops
from basecap.bench import launch, ops
from basecap.bench.launch import CASES, Clock, Launched, measure
from basecap.cli import app
from basecap.errors import ConfigError
from basecap.system import environment
from basecap.testing.marks import requires_gpu

CPU = torch.device("cpu")


def test_every_op_with_kernels_has_a_case():
    folders = {path.parent.parent.name for path in Path(basecap.ops.__file__).parent.glob("*/*_kernels/__init__.py")}
    folders |= {path.parent.name for path in Path(basecap.ops.__file__).parent.glob("*/check.py")}
    measured = {getattr(case.op, "func", case.op).__module__ for case in CASES.values()}
    assert folders <= {module.removeprefix("basecap.ops.").split(".")[0] for module in measured} | CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_each_case_calls_its_op_with_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[Callable[[], object]] = []
    for size, value in (("SHAPES", ((2, 32),)), ("CASES", {name: CASES[name]}), ("VOCABULARY", 50)):
        monkeypatch.setattr(launch, size, value)
    for size in ("D", "H", "K"):
        monkeypatch.setattr(launch, size, {"D": 32, "H": 2, "K": 16}[size])

    def called(run: Callable[[], object]) -> float:
        run()
        calls.append(run)
        return 1.0

    rows: list[launch.Row] = []
    measure(rows, CPU, Clock(called, called), lambda n, note="": None)
    passes = ["forward", "forward+backward", "forward+backward, one thread"]
    assert [row["pass"] for row in rows] == passes, rows
    assert len(calls) == 6


def timed(
    host: dict[str, float], device: dict[str, float], monkeypatch: pytest.MonkeyPatch, save=lambda: None, rows=None
) -> list[launch.Row]:
    """Return the rows of ops with known times of all passes."""

    def case(name: str) -> Launched:
        def op(x: torch.Tensor) -> torch.Tensor:
            current.append(name)
            if host[name] < 0:
                raise RuntimeError("no kernel fits.\nmore")
            return x * 2

        return Launched(op, lambda draw, B, T: {"x": draw(B, T)})

    def graph(run: Callable[[], object]) -> float:
        if device[current[-1]] < 0:
            raise RuntimeError("not permitted.\nmore")
        return device[current[-1]]

    current: list[str] = []
    done: list[float] = []
    monkeypatch.setattr(launch, "SHAPES", ((1, 4),))
    monkeypatch.setattr(launch, "CASES", {name: case(name) for name in host})
    rows = [] if rows is None else rows
    measure(rows, CPU, Clock(lambda run: host[current[-1]], graph), lambda n, note="": done.append(n), save)
    assert sum(done) == launch.most_rows() == 3 * len(host)
    return rows


def test_each_row_is_saved_when_it_comes(monkeypatch: pytest.MonkeyPatch):
    saved: list[int] = []
    rows: list[launch.Row] = []
    times = {"one": 1.0, "broken": -1.0, "two": 2.0}
    timed(times, times, monkeypatch, lambda: saved.append(len(rows)), rows)
    assert saved == [1, 2, 3, 4, 5, 6, 7]


def test_the_worst_comes_first_and_says_whether_it_meets_the_bound(monkeypatch: pytest.MonkeyPatch):
    host = {"fast": 0.29, "long": 3.9, "slow": 1.0, "wait": 4.1, "broken": -1.0, "reads": 5.0}
    device = {"fast": 0.01, "long": 2.0, "slow": 0.1, "wait": 2.0, "broken": 1.0, "reads": -1.0}
    rows = timed(host, device, monkeypatch)
    assert [row["op"] for row in rows[::3]][:4] == ["slow", "wait", "long", "fast"]
    assert [row.get("meets") for row in rows[::3]][:4] == ["no", "no", "yes", "yes"]
    assert rows[0]["ratio"] == pytest.approx(10) and {row["batch"] for row in rows} == {1}
    rest = {row["op"]: row for row in rows[12:]}
    assert rest["broken"]["cannot run"] == "no kernel fits."
    assert rest["reads"]["no graph"] == "not permitted." and "ratio" not in rest["reads"]


def test_the_host_is_timed_until_the_call_returns_on_an_idle_device(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(0.0))
    monkeypatch.setattr(time, "perf_counter", iter(range(1000)).__next__)
    assert launch._host(lambda: None) == pytest.approx(1e3)
    assert len(waits) == launch.WARM_UP + launch.CALLS + 1


def test_without_a_gpu_and_for_an_unknown_table_there_is_one_sentence():
    with pytest.raises(ConfigError, match=r"needs a CUDA GPU, not cpu; .*basecap check"):
        ops.run(device=CPU, only=("launch",))
    done = CliRunner().invoke(app, ["bench", "ops", "--device", "cpu", "--table", "lunch"])
    assert isinstance(done.exception, ConfigError) and "did you mean 'launch'" in str(done.exception)


@pytest.mark.parametrize(
    ("only", "peer", "tables"),
    [
        ([], False, ["launch", "training", "skew", "decode", "crossover"]),
        ([], True, ["launch", "training", "skew", "decode", "crossover", "peers"]),
        (["decode", "launch"], False, ["launch", "decode"]),
        (["peers"], False, ["peers"]),
    ],
)
def test_tables_are_chosen(only: list[str], peer: bool, tables: list[str]):
    assert ops._chosen(only, peer) == tables


def test_an_interrupted_table_of_launches_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, calls, read = tmp_path / "launch.json", [], []

    def host(run: Callable[[], object]) -> float:
        calls.append(run)
        read.append(json.loads(file.read_text()) if file.exists() else None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(ops, "describe", lambda device: {})
    monkeypatch.setattr(launch, "CASES", {"double": Launched(lambda x: 2 * x, lambda draw, B, T: {"x": draw(B, T)})})
    monkeypatch.setattr(launch, "_inputs", lambda case, B, T, device: [torch.ones(2)])
    monkeypatch.setattr(launch, "gpu_clock", lambda repeats: Clock(host, lambda run: 1.0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(environment, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(ops, "progress", partial(ops.progress, every=0))
    done = CliRunner().invoke(app, ["bench", "ops", "--table", "launch", "--json", str(file)])
    assert done.exit_code == 130 and "bench ops: 2 of 6 measurements (33 %)" in done.stderr
    assert [found and len(found["launch"]) for found in read] == [None, 1, 2] and not read[-1]["complete"]
    found = json.loads(file.read_text())
    assert [row["pass"] for row in found["launch"]] == list(launch.PASSES[:2]) and not found["complete"]


def test_tables_fill_and_name_what_is_absent(monkeypatch: pytest.MonkeyPatch):
    def table(heads, width, length, repeats, device):
        return [{"op": "ours", "length": length}, {"op": "theirs", "absent": "their.ops"}]

    def interrupted(heads, width, length, repeats, device):
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "describe", lambda device: {})

    def launched(rows, device, clock, advance, save):
        rows.append({"op": "launched"})
        save()

    monkeypatch.setattr(launch, "measure", launched)
    monkeypatch.setattr(ops, "TABLES", {"training": table, "peers": table})
    monkeypatch.setattr(ops, "OTHER_PEERS", ())
    saved: list[int] = []
    options = {"device": torch.device("cuda"), "length": 512, "save": lambda found: saved.append(len(found))}
    found = ops.run(**options, peer=True)
    assert found["launch"] == [{"op": "launched"}] and found["absent"] == {"theirs": "their.ops"}
    shapes = [{"heads": heads, "head_dim": width, "op": "ours", "length": 512} for heads, width in ops.SHAPES]
    assert found["training"] == found["peers"] == shapes
    assert found["complete"] and len(saved) == 5
    monkeypatch.setitem(ops.TABLES, "training", interrupted)
    found = ops.run(**options)
    assert not found["complete"] and found["launch"] and "peers" not in found


@requires_gpu[0]
@requires_gpu[1]
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own compiler
def test_on_a_gpu_every_op_is_launched_and_captured():
    found = ops.run(device=torch.device("cuda"), only=("launch",), repeats=3)
    assert [row for row in found["launch"] if "ratio" not in row] == []
    assert {row["op"] for row in found["launch"]} == set(CASES)
    assert found["complete"]

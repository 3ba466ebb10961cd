"""The checks of ops that users run."""

import re
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import basecap.ops
from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.testing import check_op as module
from basecap.testing.check_all import _op_row, failures
from basecap.testing.check_op import OPS, check_op, unchecked
from basecap.testing.tolerance import assert_as_accurate, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


#: Ops whose kernels run in the interpreter. The selective scan's have tests of their own; here they would take longest.
#: What Hopper GPUs have other kernels for runs the same ones here.
INTERPRETED = [
    name
    for name, op in OPS.items()
    if op.kernels is not None and not op.cuda and name != "selective scan" and "heads of" not in name
]
#: What an op returns, besides one gradient per input.
OUTPUTS = {"delta rule": 2, "ssd": 2, "selective scan": 2, "wkv4": 2, "wkv6": 2, "wkv7": 2}
OUTPUTS |= {"ssd mimo": 2, "delta rule by channel": 2, "delta rule, decoupled": 2}


#: The files of an op whose definition is twice its input, one of its cases being wrong.
NEW_OP = {
    "__init__.py": """
from basecap.ops._dispatch import choose, families
from basecap.ops.doubled import eager

FAMILIES = families(eager)


def doubled(x):
    return FAMILIES[choose("doubled", "auto", FAMILIES, x)].doubled(x)
""",
    "eager.py": """
RUNS, BACKEND = "PyTorch", "eager"


def supports(x):
    return None


def doubled(x):
    return x + x
""",
    "check.py": """
from basecap.ops.cases import Case
from basecap.ops.doubled import FAMILIES, doubled

FUNCTIONS = ("doubled",)


def _case(factor):
    return Case(
        plain=doubled,
        definition=lambda x: factor * x,
        inputs=lambda draw, T: {"x": draw(3, T)},
        families=FAMILIES,
    )


CASES = {"doubled": _case(2.0), "doubled wrongly": _case(2.1)}
""",
}


#: Ops with plain PyTorch only, and how the path of others begins where none of their kernels run.
ALONE = {name for name, case in OPS.items() if len(case.families) == 1}
WITHOUT_KERNELS = ("plain PyTorch: ", "PyTorch's SDPA: ")


#: What the names of cases have that run what another case does on a CPU; `test_a_wrong_path_is_found` runs these, too.
ALIKE = ("heads of", "whole tiles", ", tokens", "in parts", "bounded")


def is_complete(name: str, rows: list[dict]) -> bool:
    """Whether every output and gradient was judged in every dtype."""
    inputs = OPS[name].inputs(lambda *shape: torch.zeros(shape), module.T)
    labels = [*["o", "state"][: OUTPUTS.get(name, 1)], *(f"d{key}" for key in inputs)]
    return [row["tensor"] for row in rows] == labels * 3


@pytest.mark.parametrize("name", [name for name in OPS if not any(words in name for words in ALIKE)])
def test_what_runs_on_a_cpu_passes_here(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "T", 70)  # more than the usual chunk, of 64
    monkeypatch.setattr(module, "unsupported_by_triton", lambda x: "not tried")
    rows = check_op(name, torch.device("cpu"))
    plain = rows if name in ALONE else [row for row in rows if row["path"].startswith(WITHOUT_KERNELS)]
    others = [row for row in rows if row not in plain]
    assert is_complete(name, plain)
    assert [row["result"] for row in rows] == ["passed"] * len(rows)
    assert {row["path"] for row in others} == ({"Numba kernels"} if name == "selective scan" else set())
    assert not others or is_complete(name, others)
    left = {"selective scan": ["Triton kernels"], "delta rule": ["Triton kernels", "flash-linear-attention's kernels"]}
    assert list(unchecked(rows)) == left.get(name, list(unchecked(rows)))


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_pass_here(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "T", 40)
    monkeypatch.setattr(module, "DTYPES", (torch.float32,))
    rows = check_op(name, torch.device("cpu"))
    plain = [row for row in rows if row["path"] == "plain PyTorch"]
    kernels = [row for row in rows if row not in plain]
    assert {row["path"].split(":")[0].removesuffix(" by chunks") for row in kernels} == {"Triton kernels"}
    assert len(plain) == len(kernels)
    assert [row["result"] for row in rows] == ["passed"] * len(rows)


@pytest.mark.parametrize("name", sorted(OPS.keys() - {"linear cross entropy"}))
def test_inputs_that_are_no_floating_tensors_are_named(name: str):
    op = OPS[name].kernels or OPS[name].plain
    inputs = OPS[name].inputs(lambda *shape: torch.zeros(shape), module.T)
    for argument, x in inputs.items():
        for wrong, what in ((x.tolist(), "list"), (x.numpy(), "ndarray"), (x.long(), "int64"), (x[0], "be")):
            with pytest.raises(ConfigError, match=rf"\b{argument}\b.* must .*\b{what}\b"):
                op(*{**inputs, argument: wrong}.values())
    if "segments" in signature(op).parameters:
        x = next(iter(inputs.values()))
        ids = torch.zeros(x.shape[:2], dtype=torch.int64)
        ids[:, 1:3] = 1
        for wrong, what in ((ids, "decrease"), (ids.float(), "integers"), (ids.tolist(), "list"), (ids[:, 1:], "be")):
            with pytest.raises(ConfigError, match=rf"^segments .*{what}"):
                op(*inputs.values(), segments=wrong)


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_path_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    """What runs is off by a thousandth, in plain PyTorch and as kernels; beside such kernels plain PyTorch passes."""
    op = OPS[name]

    def wrong(*tensors):
        outputs = op.plain(*tensors)
        return outputs * 1.001 if isinstance(outputs, torch.Tensor) else [x * 1.001 for x in outputs]

    monkeypatch.setattr(module, "T", 40)
    monkeypatch.setattr(module, "DTYPES", (torch.float32,))
    monkeypatch.setattr(module, "unsupported_by_triton", lambda x: None)
    numba = None if op.numba is None else wrong
    broken = (
        replace(op, plain=wrong, kernels=None, numba=None),
        replace(op, kernels=wrong, numba=numba, cuda=False),
    )
    for entry in broken[:1] if name in ALONE else broken:
        monkeypatch.setitem(OPS, name, entry)
        every = check_op(name, torch.device("cpu"))
        rows = every if name in ALONE else [row for row in every if row["path"] != "plain PyTorch"]
        assert all(row in rows or row["result"] == "passed" for row in every)
        assert rows and [row["result"].split(" errs")[0] for row in rows] == [row["tensor"] for row in rows]


def test_a_state_is_judged_in_the_dtype_of_kernels_that_multiply_in_it(monkeypatch: pytest.MonkeyPatch):
    op = OPS["wkv7 bounded"]

    def rounded(*tensors):
        o, state = op.plain(*tensors)
        return o, state * (1 + torch.finfo(tensors[0].dtype).eps / 4)

    monkeypatch.setattr(module, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(module, "unsupported_by_triton", lambda x: None)
    for half in (True, False):
        monkeypatch.setitem(OPS, "wkv7 bounded", replace(op, kernels=rounded, cuda=False, half=half))
        found = check_op("wkv7 bounded", torch.device("cpu"))
        rows = {row["tensor"]: row["result"] for row in found if row["path"] != "plain PyTorch"}
        assert (rows["o"], rows["state"] == "passed") == ("passed", half)


def test_rows_for_people_say_what_ran():
    rows = [_op_row(row) for row in check_op("attention", torch.device("cpu"))]
    assert {row["result"] for row in rows} == {"passed, PyTorch's SDPA: full attention is faster on SDPA"}
    assert not failures(rows)
    wrong = {**rows[0], "result": "o errs by 1 of its norm"}
    assert failures([rows[0], wrong]) == [wrong]


def test_a_new_op_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing else is edited: `basecap check` finds it, and it fails where the op is not its definition."""
    for name, text in NEW_OP.items():
        (tmp_path / "doubled").mkdir(exist_ok=True)
        (tmp_path / "doubled" / name).write_text(text)
    monkeypatch.setattr(basecap.ops, "__path__", [*basecap.ops.__path__, str(tmp_path)])
    try:
        found = module.discover()
    finally:
        for name in ("doubled.check", "doubled.eager", "doubled"):
            sys.modules.pop(f"basecap.ops.{name}", None)
    assert found.keys() - OPS.keys() == {"doubled", "doubled wrongly"}
    for name in ("doubled", "doubled wrongly"):
        monkeypatch.setitem(OPS, name, found[name])
        rows = check_op(name, torch.device("cpu"))
        assert [row["tensor"] for row in rows] == ["o", "dx"] * 3 and {row["path"] for row in rows} == {"PyTorch"}
        assert all((row["result"] == "passed") == (name == "doubled") for row in rows)


def test_two_ops_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch):
    twice = {"one": SimpleNamespace(CASES={"x": None}), "other": SimpleNamespace(CASES={"x": None})}
    monkeypatch.setattr(module, "checks", lambda: twice)
    with pytest.raises(ConfigError, match=r"basecap\.ops\.other\.check: another op has a case 'x'; rename one"):
        module.discover()


def test_who_uses_an_op_imports_no_check():
    package = Path(basecap.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"^ *(from|import) basecap\.ops\b.*\b(cases|check)\b", path.read_text(), re.MULTILINE)
    }
    own = {f"ops/{op}/check.py" for op in module.checks()}
    assert users == own | {"ops/_selection/draws.py", "testing/check_op.py"}


def test_an_unknown_op_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'top1-element'"):
        check_op("top1-elements", torch.device("cpu"))


def test_tolerance_compares_with_plain_pytorch():
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    plain = (exact * (1 + 1e-4)).float()
    assert relative_error(plain, exact) == pytest.approx(1e-4, rel=1e-2)
    assert_as_accurate("x", (exact * (1 + 1.9e-4)).float(), plain, exact)
    with pytest.raises(AssertionError, match="x errs by"):
        assert_as_accurate("x", (exact * (1 + 2.2e-4)).float(), plain, exact)
    spike = plain.clone()
    spike[3] += 1e-3
    with pytest.raises(AssertionError, match="at its worst place"):
        assert_as_accurate("x", spike, plain, exact)
    spike[3] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_accurate("x", spike, plain, exact)


@pytest.mark.parametrize("largest", [1.0, 2.0**-20])  # the second is below float16's smallest normal number
def test_two_units_in_the_last_place_of_the_largest_number_are_allowed(largest: float):
    numbers = torch.finfo(torch.float16)
    exact = torch.full((1_000_000,), largest, dtype=torch.float16)
    last = max(largest, numbers.tiny) * numbers.eps
    value = exact.clone()
    value[0] += 2 * last
    assert_as_accurate("x", value, exact, exact)
    value[0] += last
    with pytest.raises(AssertionError, match="at its worst place"):
        assert_as_accurate("x", value, exact, exact)

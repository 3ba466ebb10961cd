"""The checks of ops that users run."""

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.testing import check_op as module
from basecap.testing.check_op import OPS, check_op
from basecap.testing.tolerance import assert_as_accurate, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", OPS)
def test_every_op_passes_here(name):
    rows = check_op(name, torch.device("cpu"))
    assert [row["tensor"] for row in rows if "tensor" in row] == ["o", "dq", "dk", "dv"]
    assert all(row["result"] == "passed" for row in rows if "tensor" in row)


def test_a_wrong_kernel_is_found(monkeypatch):
    op, definition = OPS["top1-element"]

    def wrong(q, k, v, backend):
        return op(q, k, v, backend="eager") * (1.001 if backend == "triton" else 1.0)

    monkeypatch.setitem(OPS, "top1-element", (wrong, definition))
    monkeypatch.setattr(module, "unsupported", lambda x: None if x.dtype == torch.float32 else "not tried")
    rows = check_op("top1-element", torch.device("cpu"))
    assert [row["result"].split(" errs")[0] for row in rows if "tensor" in row] == ["o", "dq", "dk", "dv"]


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

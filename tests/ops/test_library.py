"""Which library kernels run: by tensor, by version and card, by request; said once."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops import _library
from basecap.ops import wkv6 as package_6
from basecap.ops import wkv7 as package_7
from basecap.ops.wkv6 import library as library_6
from basecap.ops.wkv7 import LOWEST, wkv7, wkv7_bounded
from tests.ops._recurrences import draw

OPS = ("the delta rule", "wkv6", "wkv7")


@pytest.fixture(autouse=True)
def forget():
    _library._say.cache_clear()
    _library._refusal.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes anything on any card."""
    monkeypatch.setattr(_library, "_installed", lambda op, device: None)


def on_card(*shape: int, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """Return what a decision sees of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("fla", "triton", "capability", "reason"),
    [
        ("0.6.0", "3.7.1", (9, 0), None),
        ("0.6.1", "3.8.0+git1", (9, 0), None),
        ("0.6.0", "3.6.0", (8, 0), None),
        ("0.6.0", "3.3.1", (9, 0), None),
        ("0.6.0", "3.6.0", (9, 0), "Triton 3.6.0 computes wrong gradients"),
        ("0.6.0", "3.4.0", (9, 0), "Triton 3.4.0 computes wrong gradients"),
        ("0.6.0", "3.7.0", (9, 0), "install triton 3.7.1 or newer"),
        ("0.5.2", "3.7.1", (8, 0), "fla-core 0.5.2 is older"),
    ],
)
def test_known_bad_versions_are_refused_by_name(fla: str, triton: str, capability: tuple[int, int], reason: str | None):
    found = _library.known_bad("the delta rule", fla, triton, capability)
    assert found == reason or reason in found


@pytest.mark.parametrize("op", ["wkv6", "wkv7"])
def test_a_fault_of_one_op_is_not_held_against_another(op: str):
    assert _library.known_bad(op, "0.6.0", "3.6.0", (9, 0)) is None
    assert "older" in _library.known_bad(op, "0.5.9", "3.6.0", (9, 0))


def test_faults_name_ops_that_exist():
    assert {fault.op for fault in _library.FAULTS} <= set(OPS)


def test_versions_and_card_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_library, "version", {"fla-core": "0.6.0", "triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    v = on_card(2, 5, 3, 64)
    assert "Triton 3.6.0" in _library.unsupported("the delta rule", v, None)
    assert _library.unsupported("wkv6", v, None) is None
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: None)
    _library._refusal.cache_clear()
    assert "basecap[gpu]" in _library.unsupported("wkv6", v, None)


@pytest.mark.usefixtures("installed")
def test_tensors_the_library_does_not_take():
    assert _library.unsupported("wkv6", torch.ones(1), None) == "the tensors are on cpu"
    assert "torch.float32" in _library.unsupported("wkv6", on_card(1, dtype=torch.float32), None)
    assert "packed" in _library.unsupported("wkv6", on_card(1), torch.zeros(1, 1))
    assert _library.unsupported("wkv6", on_card(1, dtype=torch.float16), None) is None


def test_requests():
    assert _library.use_library("some op", "auto", None)
    assert _library.use_library("some op", "triton", None)
    assert not _library.use_library("some op", "eager", None)
    assert not _library.use_library("some op", "auto", "a reason")
    with pytest.raises(ConfigError, match=r"some op cannot run library kernels: a reason; use backend='auto'"):
        _library.use_library("some op", "triton", "a reason")
    with pytest.raises(ConfigError, match="did you mean 'eager'"):
        _library.use_library("some op", "eagre", None)


def test_a_decision_is_said_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="basecap.ops"):
        for reason in (None, "a reason", None, "a reason"):
            _library.use_library("some op", "auto", reason)
    assert [record.message for record in caplog.records] == [
        "some op runs flash-linear-attention's kernels",
        "some op does without flash-linear-attention's kernels: a reason",
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("keys", "values", "chosen"),
    [
        ((2, 300, 3, 64), (2, 300, 3, 64), True),
        ((2, 300, 3, 64), (2, 300, 3, 128), False),
        ((2, 300, 3, 32), (2, 300, 3, 32), False),
        ((2, 1, 3, 64), (2, 1, 3, 64), False),
        ((0, 300, 3, 64), (0, 300, 3, 64), False),
    ],
)
def test_sizes_that_are_tested(keys: tuple[int, ...], values: tuple[int, ...], chosen: bool):
    assert library_6.use_library("wkv6", on_card(*keys), on_card(*values), None) is chosen


def inputs(which: str) -> list[Tensor]:
    shape = (2, 9, 3, 4)
    r, k, v = (draw(seed, *shape) for seed in range(3))
    log_decay = LOWEST * draw(3, *shape).sigmoid()
    if which == "wkv6":
        return [r, k, v, log_decay, draw(4, 3, 4)]
    return [r, log_decay, k, v, draw(4, *shape), draw(5, *shape)]


@pytest.mark.parametrize("which", ["wkv6", "wkv7"])
def test_the_library_gets_what_the_op_got(which: str, monkeypatch: pytest.MonkeyPatch):
    package = {"wkv6": package_6, "wkv7": package_7}[which]
    op = {"wkv6": package_6.wkv6, "wkv7": wkv7_bounded}[which]
    given = []
    monkeypatch.setattr(package.library, which, lambda *x: given.append(x) or ("o", "final"))
    where = package_6.library if which == "wkv6" else package_7
    monkeypatch.setattr(where, "use_library", lambda *x: True)
    x, state = inputs(which), draw(9, 2, 3, 4, 4)
    assert op(*x, state_BHKV=state) == ("o", "final")
    assert all(a is b for a, b in zip(given[0], [*x, state], strict=False))


def test_bounded_decays_change_nothing_without_the_library():
    x = inputs("wkv7")
    for found, expected in zip(wkv7_bounded(*x), wkv7(*x), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match="log_decay"):
        wkv7_bounded(x[0], x[1][:, 1:], *x[2:])

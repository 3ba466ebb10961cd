"""Which library kernels run: by tensor, by version and card, by request; said once."""

import importlib.metadata
import logging
from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops import _dispatch, _library, delta_rule
from basecap.ops.delta_rule import library
from tests.ops._recurrences import draw


@pytest.fixture(autouse=True)
def forget():
    _dispatch._log_once.cache_clear()
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


def test_a_fault_of_one_op_is_not_held_against_another():
    assert _library.known_bad("some op", "0.6.0", "3.6.0", (9, 0)) is None
    assert "older" in _library.known_bad("some op", "0.5.9", "3.6.0", (9, 0))


def test_faults_name_ops_that_exist():
    assert {fault.op for fault in _library.FAULTS} == {library.OP}


def test_versions_and_card_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_library, "version", {"fla-core": "0.6.0", "triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    v = on_card(2, 5, 3, 64)
    assert "Triton 3.6.0" in _library.unsupported("the delta rule", v, None)
    assert _library.unsupported("some op", v, None) is None
    monkeypatch.setattr(_library, "version", lambda name: importlib.metadata.version(f"no-{name}"))
    _library._refusal.cache_clear()
    assert "release of no-fla-core cannot be told" in _library.unsupported("some op", v, None)
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: None)
    _library._refusal.cache_clear()
    assert "basecap[gpu]" in _library.unsupported("some op", v, None)


@pytest.mark.usefixtures("installed")
def test_tensors_the_library_does_not_take():
    assert _library.unsupported("some op", torch.ones(1), None) == "the tensors are on cpu"
    assert "torch.float32" in _library.unsupported("some op", on_card(1, dtype=torch.float32), None)
    assert "packed" in _library.unsupported("some op", on_card(1), torch.zeros(1, 1))
    assert _library.unsupported("some op", on_card(1, dtype=torch.float16), None) is None


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
        "some op runs without flash-linear-attention's kernels: a reason",
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("channels", "chosen"), [(128, False), (192, True), (256, True), (257, False)])
def test_only_wide_heads_of_the_delta_rule_need_it(channels: int, chosen: bool, monkeypatch: pytest.MonkeyPatch):
    q, k, v, beta = (draw(seed, 1, 3, 2, channels) for seed in range(4))
    taken = []
    monkeypatch.setattr(library, "delta_rule", lambda *x: taken.append(x) or ("o", "final"))
    monkeypatch.setattr(_library, "unsupported", lambda op, v, segments: None)
    delta_rule.delta_rule(q, k, v, beta[..., 0])
    assert bool(taken) is chosen
    if chosen:
        assert taken[0][0] is q and taken[0][4] is None

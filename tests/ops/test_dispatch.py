"""Which implementation runs, and that it is said once."""

import logging
from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops import _dispatch
from basecap.ops._dispatch import choose, constant_result, use_triton


@pytest.fixture(autouse=True)
def forget():
    _dispatch._log_once.cache_clear()
    _dispatch._import_error.cache_clear()
    yield
    _dispatch._import_error.cache_clear()


def test_auto_runs_plain_pytorch_on_a_cpu_and_says_so_once(caplog):
    x = torch.ones(2, 2)
    with caplog.at_level(logging.INFO, logger="basecap.ops"):
        assert not any(use_triton("some op", "auto", x) for _ in range(3))
    assert [record.message.split(":")[0] for record in caplog.records] == ["some op runs in plain PyTorch"]


def test_what_keeps_an_op_from_kernels_is_kept_and_only_logged_where_asked_for(caplog):
    use_triton("some op", "auto", torch.ones(2))
    assert not caplog.records  # at the level that is shown by default
    assert _dispatch.IMPLEMENTATIONS["some op"].startswith("in plain PyTorch: ")


def test_of_references_nothing_is_said(caplog):
    assert not use_triton("some op", "auto", torch.ones(2, dtype=torch.float64))
    assert not caplog.records


def test_eager_never_runs_kernels():
    assert not use_triton("some op", "eager", torch.ones(1))


def test_a_forced_choice_that_cannot_run_raises():
    with pytest.raises(ConfigError, match=r"some op cannot run its Triton kernels.*float64.*use backend='auto'"):
        use_triton("some op", "triton", torch.ones(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match="at most 256 channels"):
        use_triton("some op", "triton", torch.ones(1, 512), widest=256)


def test_without_the_interpreter_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "interpreted", lambda: False)
    assert _dispatch.unsupported_by_triton(torch.ones(1)) in ("the tensors are on cpu", "triton is not installed")


@pytest.mark.parametrize(
    ("capability", "memory", "reason"),
    [
        ((7, 5), 4096, "the kernels need compute capability 8.0 or newer"),
        ((7, 9), 4096, "the kernels need compute capability 8.0 or newer"),
        ((8, 0), 4096, None),
        ((9, 0), 4096, None),
        ((8, 0), 2047, "the kernels need 2 KB of shared memory"),
        ((8, 0), 2048, None),
    ],
)
def test_what_a_card_needs_for_the_kernels(capability, memory: int, reason: str | None, monkeypatch):
    card = SimpleNamespace(shared_memory_per_multiprocessor=memory)
    monkeypatch.setattr(_dispatch, "interpreted", lambda: False)
    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert _dispatch._unsupported(torch.device("cuda", 0), torch.float32, 2048) == reason


def test_the_interpreter_runs_float32_alone(monkeypatch):
    monkeypatch.setattr(_dispatch, "interpreted", lambda: True)
    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: name)
    assert _dispatch.unsupported_by_triton(torch.ones(1, 16), widest=16) is None
    assert "float32" in _dispatch.unsupported_by_triton(torch.ones(1, dtype=torch.bfloat16))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        use_triton("some op", "tritn", torch.ones(1))


def test_a_cpu_takes_the_kernels_that_numba_compiles(caplog):
    pytest.importorskip("numba")
    with caplog.at_level(logging.INFO, logger="basecap.ops"):
        assert choose("some op", "auto", torch.ones(1), numba=True) == "numba"
        assert choose("some op", "auto", torch.ones(1, dtype=torch.float64), numba=True) == "eager"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "some op runs its Numba kernels")
    ]


def test_without_numba_plain_pytorch_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: None)
    assert choose("some op", "auto", torch.ones(1), numba=True) == "eager"
    said = "in plain PyTorch: numba is not installed (pip install 'basecap[cpu]')"
    assert _dispatch.IMPLEMENTATIONS["some op"] == said
    with pytest.raises(ConfigError, match="some op cannot run its Numba kernels: numba is not installed"):
        choose("some op", "numba", torch.ones(1), numba=True)


@pytest.mark.parametrize("error", [ImportError("Numba needs an older NumPy"), OSError("no such library")])
def test_a_numba_that_cannot_be_imported_is_as_good_as_none(error: Exception, monkeypatch):
    def fail(name: str):
        raise error

    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_dispatch.importlib, "import_module", fail)
    assert choose("some op", "auto", torch.ones(1), numba=True) == "eager"
    assert _dispatch.IMPLEMENTATIONS["some op"] == f"in plain PyTorch: numba cannot be imported: {error}"


def test_an_op_without_kernels_for_the_cpu_has_no_such_backend():
    with pytest.raises(ConfigError, match="unknown backend 'numba'"):
        use_triton("some op", "numba", torch.ones(1))


def test_a_constant_result_is_marked_as_pytorch_marks_it():
    ours, theirs = constant_result(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(theirs) != {}

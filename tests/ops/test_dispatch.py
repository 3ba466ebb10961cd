"""Which implementation runs, what is said of it, and that it is logged once."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from basecap.errors import ConfigError
from basecap.ops import _dispatch
from basecap.ops._dispatch import IMPLEMENTATIONS, choose, constant_result, recorded, unsupported_by_triton
from basecap.ops.wkv4 import eager, triton_kernels


@pytest.fixture(autouse=True)
def forget():
    _dispatch._log_once.cache_clear()
    _dispatch._import_error.cache_clear()
    yield
    _dispatch._import_error.cache_clear()


def family(runs: str, backend: str | None, reason: str | None = None) -> SimpleNamespace:
    """Return an implementation that cannot run for this reason, or can."""
    return SimpleNamespace(RUNS=runs, BACKEND=backend, supports=lambda *given: reason)


PLAIN = family("plain PyTorch", "eager")


def on_gpu(dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Return what a decision sees of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype)


def test_auto_runs_plain_pytorch_on_a_cpu_and_says_so_once(caplog):
    x = torch.ones(2, 2)
    with caplog.at_level(logging.INFO, logger="basecap.ops"):
        assert [choose("some op", "auto", {"K": family("kernels", "triton"), "P": PLAIN}, x) for _ in range(3)] == 3 * [
            "P"
        ]
    assert [record.message for record in caplog.records] == ["some op runs plain PyTorch: the tensors are on cpu"]


def test_the_first_family_that_supports_the_tensors_runs():
    def chosen(*reasons: str | None, x: object = on_gpu()) -> tuple[str, dict[str, str]]:
        names = ("Gluon kernels", "Triton kernels")
        families = {name[0]: family(name, "triton", why) for name, why in zip(names, reasons, strict=True)}
        with recorded() as ran:
            return choose("some op", "auto", families | {"P": PLAIN}, x), ran

    assert chosen(None, None) == ("G", {"some op": "Gluon kernels"})
    assert chosen("old", None) == ("T", {"some op": "Triton kernels: no Gluon kernels because old"})
    assert chosen("old", "older") == (
        "P",
        {"some op": "plain PyTorch: no Gluon kernels because old; no Triton kernels because older"},
    )
    assert chosen("old", "old") == ("P", {"some op": "plain PyTorch: old"})
    # Triton's kernels can run on a CPU, in the interpreter, only if forced.
    assert chosen(None, None, x=torch.ones(1)) == ("P", {"some op": "plain PyTorch: the tensors are on cpu"})


def test_a_backend_takes_only_its_own_families():
    families = {
        "G": family("Gluon kernels", "triton", "old"),
        "L": family("a library", None),
        "N": family("Numba kernels", "numba", "not installed"),
        "P": PLAIN,
    }
    with recorded() as ran:
        assert choose("some op", "eager", families, on_gpu()) == "P"
        assert choose("some op", "auto", families, on_gpu()) == "L"
    with _dispatch.without_kernels():
        assert choose("some op", "auto", families, on_gpu()) == "P"
    assert ran == {"some op": "a library: no Gluon kernels because old"}
    for backend, message in (
        ("triton", "some op cannot run its Gluon kernels: old; use backend='auto' or 'eager'"),
        ("numba", "some op cannot run its Numba kernels: not installed"),
        ("trito", "unknown backend 'trito': did you mean 'triton'"),
        (None, "unknown backend None"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose("some op", backend, families, on_gpu())


def test_all_that_ran_is_recorded_and_nothing_else_is_changed(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "held", "as it was")
    before = dict(IMPLEMENTATIONS)
    with recorded() as ran:
        for reason in (None, "a single token", None):
            choose("some op", "auto", {"K": family("kernels", None, reason), "P": PLAIN}, on_gpu())
        choose("float64", "auto", {"P": PLAIN}, on_gpu(torch.float64))  # what others are compared with
    assert ran == {"some op": "kernels | plain PyTorch: a single token"}
    assert before == IMPLEMENTATIONS


def test_compiled_code_records_what_it_runs():
    families = {"K": triton_kernels, "P": eager}
    compiled = torch.compile(
        lambda x: x * (choose("some op", "auto", families, x) == "P"), backend="eager", fullgraph=True
    )
    with recorded() as ran:
        compiled(torch.ones(3))
    assert ran == {"some op": "plain PyTorch: the tensors are on cpu"}


def test_kernels_that_are_slower_run_if_they_are_forced():
    families = {"K": family("kernels", "triton"), "P": PLAIN}
    odd = {"K": family("kernels", "triton", "it is odd"), "P": PLAIN}
    with recorded() as ran:
        assert choose("some op", "auto", families, on_gpu()) == "K"
        assert choose("some op", "eager", families, on_gpu()) == "P"
        assert choose("slow op", "auto", families, on_gpu(), slower="it is slower") == "P"
        assert choose("odd op", "auto", odd, on_gpu(), slower="it is slower") == "P"
        assert choose("forced op", "triton", families, on_gpu(), slower="it is slower") == "K"
        assert choose("interpreted op", "triton", families, torch.ones(1)) == "K"
    assert ran == {
        "some op": "kernels",
        "slow op": "plain PyTorch: it is slower",
        "odd op": "plain PyTorch: it is odd",
        "forced op": "kernels",
        "interpreted op": "kernels",
    }
    with pytest.raises(ConfigError, match=r"odd op cannot run its kernels: it is odd; use backend='auto' or 'eager'"):
        choose("odd op", "triton", odd, on_gpu())


def test_kernels_have_no_float64():
    assert re.search("float64|not installed", unsupported_by_triton(torch.ones(1, dtype=torch.float64)))


def test_wide_heads_are_refused(monkeypatch):
    monkeypatch.setattr(_dispatch, "_unsupported", lambda *_: None)
    assert _dispatch.unsupported_by_triton(torch.ones(1, 256), widest=256) is None
    assert "at most 256 channels, not 257" in _dispatch.unsupported_by_triton(torch.ones(1, 257), widest=256)


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


def test_numba_takes_a_cpu():
    pytest.importorskip("numba")
    cpu = torch.device("cpu")
    assert _dispatch.unsupported_by_numba(cpu, torch.bfloat16) is None
    assert "float64" in _dispatch.unsupported_by_numba(cpu, torch.float64)
    assert "cuda" in _dispatch.unsupported_by_numba(torch.device("cuda", 0), torch.float32)


def test_without_numba_an_op_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: None)
    reason = "numba is not installed (pip install 'basecap[cpu]')"
    assert _dispatch.unsupported_by_numba(torch.device("cpu"), torch.float32) == reason


@pytest.mark.parametrize("error", [ImportError("Numba needs an older NumPy"), OSError("no such library")])
def test_a_numba_that_cannot_be_imported_is_as_good_as_none(error: Exception, monkeypatch):
    def fail(name: str):
        raise error

    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_dispatch.importlib, "import_module", fail)
    reason = f"numba cannot be imported: {error}"
    assert _dispatch.unsupported_by_numba(torch.device("cpu"), torch.float32) == reason


def test_a_constant_result_is_marked_as_pytorch_marks_it():
    ours, theirs = constant_result(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(theirs) != {}


def test_kernels_that_no_gpu_has_run_are_left_out_unless_asked_for():
    untried = family("kernels", "triton")
    untried.untried = lambda *given: "they have not passed their tests on a GPU"
    families = {"K": untried, "P": PLAIN}
    with recorded() as ran:
        assert choose("op", "auto", families, on_gpu()) == "P"
    assert ran == {"op": "plain PyTorch: they have not passed their tests on a GPU"}
    assert choose("op", "triton", families, on_gpu()) == "K"


def test_families_that_vary_are_left_out_where_the_same_bits_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    varies = family("kernels", "triton")
    varies.REPEATS = False
    families = {"K": varies, "P": PLAIN}
    with recorded():
        assert choose("op", "auto", families, on_gpu()) == "K"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with recorded() as ran:
        assert choose("op", "auto", families, on_gpu()) == "P"
    assert ran == {"op": "plain PyTorch: they have no deterministic form"}
    with pytest.raises(ConfigError, match="op cannot run its kernels: they have no deterministic form; use backend="):
        choose("op", "triton", families, on_gpu())


def test_a_decision_is_made_once_for_tensors_of_one_kind_and_noted_each_time(monkeypatch: pytest.MonkeyPatch):
    asked, kernels = [], family("kernels", None)
    monkeypatch.setattr(kernels, "supports", lambda x, number: asked.append((tuple(x.shape), number)))
    families = {"K": kernels, "P": PLAIN}
    for _ in range(2):
        with recorded() as ran:
            for shape, number in (((2,), 1), ((3,), 1), ((2,), 2)):
                assert choose("some op", "auto", families, torch.ones(shape), number) == "K"
        assert ran == {"some op": "kernels"}
    assert asked == [((2,), 1), ((3,), 1), ((2,), 2)]
    with _dispatch.without_kernels():
        assert choose("some op", "auto", families, torch.ones(2), 1) == "P"
    for leaf in (torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64)):
        choose("some op", "auto", families, leaf, 1)
    choose("some op", "auto", {**families}, torch.ones(2), 1)
    assert len(asked) == 6

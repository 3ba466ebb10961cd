"""The families of all ops: they have the same functions and say what they cannot do."""

import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import basecap.ops
from basecap.errors import ConfigError
from basecap.ops import _dispatch
from basecap.ops._dispatch import functions_of
from basecap.ops.top1_chunk import gluon_kernels
from basecap.ops.top1_chunk.cache import STEP_FAMILIES
from basecap.testing.check_op import checks

#: The functions that every family of an op has.
FUNCTIONS = {op: check.FUNCTIONS for op, check in checks().items()}
PACKAGES = {op: importlib.import_module(f"basecap.ops.{op}") for op in FUNCTIONS}
FAMILIES = {op: package.FAMILIES for op, package in PACKAGES.items()} | {"top1_chunk_step": STEP_FAMILIES}


def names_of(x: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments, without the suffixes of their layouts."""
    return [name.partition("_")[0] for name in inspect.signature(x).parameters]


def test_every_op_is_checked_in_every_way_it_is_called():
    folders = {path.parent.name for path in Path(basecap.ops.__file__).parent.glob("*/__init__.py")}
    assert {name for name in folders if not name.startswith("_")} == FUNCTIONS.keys()
    for op, check in checks().items():
        own = {name for name, case in check.CASES.items() if case.families is PACKAGES[op].FAMILIES}
        assert own and own == check.CASES.keys()


#: What families are called by the first word of their folder's name.
CALLED = {
    "triton": "Triton kernels",
    "gluon": "Gluon kernels",
    "numba": "Numba kernels",
    "fla": "flash-linear-attention's kernels",
    "flex": "FlexAttention",
}


def test_a_folder_is_an_implementation_and_is_named_as_it_is_shown():
    folders = {
        op: {found.name for found in pkgutil.iter_modules(PACKAGES[op].__path__) if found.ispkg} for op in PACKAGES
    }
    listed = {op: FAMILIES[op].keys() - {"eager"} for op in PACKAGES}
    assert folders == listed | {"top1_chunk": listed["top1_chunk"] | STEP_FAMILIES.keys() - {"eager"}}
    shown = {(name, family.RUNS) for families in FAMILIES.values() for name, family in families.items()}
    for name, runs in sorted(pair for pair in shown if pair[0] != "eager"):
        first, _, rest = name.partition("_")
        assert runs in (CALLED[first], f"{CALLED[first]} by {rest}")
        assert rest, f"a folder {name} would have the name of the library that it imports"


@pytest.mark.parametrize("op", FAMILIES)
def test_families_are_interchangeable(op: str):
    families, names = FAMILIES[op], FUNCTIONS.get(op, ("decode",))
    *others, last = families
    # Plain PyTorch is a file of this name, each other family a folder of its own.
    assert last == "eager" and families["eager"].BACKEND == "eager" and not hasattr(families["eager"], "__path__")
    assert len({family.RUNS for family in families.values()}) == len(families)
    for key in others:
        family = families[key]
        assert Path(family.__file__).parts[-2:] == (key, "__init__.py")
        given, expected = (inspect.signature(x.supports).parameters for x in (family, families["eager"]))
        assert [*given] == [*expected]
        own = names[0] in vars(family)
        if not own and importlib.util.find_spec("numba" if family.BACKEND == "numba" else "triton") is None:
            continue
        run = family if own else functions_of(family)
        for name in names:
            found, expected = (names_of(getattr(x, name)) for x in (run, families["eager"]))
            assert found == expected[: len(found)]  # plain PyTorch may have options of its own


@pytest.mark.parametrize(
    ("capability", "triton", "chunk", "shape", "reason"),
    [
        ((9, 0), "3.6.1", 128, (1, 256, 2, 64), None),
        ((9, 0), "3.7.0", 128, (1, 256, 2, 128), None),
        ((8, 9), "3.7.0", 128, (1, 256, 2, 64), "the GPU is not a Hopper"),
        ((10, 0), "3.7.0", 128, (1, 256, 2, 64), "the GPU is not a Hopper"),
        ((9, 0), "3.5.1", 128, (1, 256, 2, 64), "Triton 3.5.1 is neither 3.6 nor 3.7"),
        ((9, 0), "3.8.0", 128, (1, 256, 2, 64), "Triton 3.8.0 is neither 3.6 nor 3.7"),
        ((9, 0), "3.7.0", 64, (1, 256, 2, 64), "they take chunks of 128"),
        ((9, 0), "3.7.0", 128, (1, 256, 2, 96), "heads of 64 or 128 channels"),
    ],
)
def test_what_the_gluon_kernels_need(capability, triton: str, chunk: int, shape, reason: str | None, monkeypatch):
    module = pytest.importorskip("triton")
    q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=shape, element_size=lambda: 2)
    monkeypatch.setattr(gluon_kernels.triton_kernels, "unsupported_by_triton", lambda x, **_: None)
    monkeypatch.setattr(gluon_kernels, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "__version__", triton)
    found = gluon_kernels.supports(q, chunk)
    assert found is None if reason is None else reason in found
    q.element_size = lambda: 4
    assert "in 16 bits" in gluon_kernels.supports(q, chunk)
    monkeypatch.setattr(gluon_kernels.triton_kernels, "unsupported_by_triton", lambda x, **_: "a reason")
    assert gluon_kernels.supports(q, chunk) == "a reason"


def test_what_a_gpu_cannot_launch_runs_elsewhere(monkeypatch: pytest.MonkeyPatch):
    """The second and third axis of a grid end at 65,535 programs: kernels refuse more rows or chunks than that."""
    monkeypatch.setattr(_dispatch, "_unsupported", lambda *_: None)
    number = torch.empty(1, dtype=torch.bfloat16)

    def refused(*shape: int) -> set[tuple[str, str]]:
        x = number.expand(*shape)
        per_channel, nothing = x[:, :, 0], (None, None)
        given = {
            "channel_delta_rule": (x, x),
            "delta_rule": (x, x, None),
            "forgetting_attention": (x, x),
            "long_convolution": (per_channel, None),
            "selective_scan": (per_channel,),
            "ssd": (x, x),
            "ssd_mimo": (x[:, :, None], x[:, :, None]),
            "taylor_attention": (x, x, *nothing),
            "top1_chunk_step": (x[:, :1], 128),
            "wkv4": (per_channel,),
            "wkv6": (x, x),
            "wkv7": (x, x),
        }
        found = {(op, key): family.supports(*given[op]) for op in given for key, family in FAMILIES[op].items()}
        return {place for place, reason in found.items() if reason is not None and "at most 65,535 programs" in reason}

    kernels = {("delta_rule", "triton_kernels"), ("long_convolution", "triton_kernels"), ("ssd", "triton_kernels")}
    kernels |= {("ssd_mimo", "triton_chunks"), ("ssd_mimo", "triton_positions")}
    kernels |= {(op, "triton_chunks") for op in ("channel_delta_rule", "wkv6", "wkv7")}
    rows = {("selective_scan", "triton_kernels"), ("wkv4", "triton_kernels"), ("top1_chunk_step", "triton_step")}
    heads = {(op, "triton_kernels") for op in ("forgetting_attention", "taylor_attention")}
    heads |= {(op, "triton_tokens") for op in ("channel_delta_rule", "wkv6", "wkv7")}
    assert refused(65_535, 100, 1, 16) == set()
    assert refused(65_536, 100, 1, 16) == kernels | rows | heads
    assert refused(8192, 100, 8, 16) == heads
    assert refused(1, 64 * 65_536, 1, 16) == kernels


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("channel_delta_rule", [(2, 3, 1, 0)] * 2 + [(2, 3, 1, 4), (2, 3, 1), (2, 3, 1, 0)], "K at least 1"),
        ("delta_rule", [(2, 3, 1, 0), (2, 3, 1, 0), (2, 3, 1, 4), (2, 3, 1)], "K at least 1"),
        ("linear_cross_entropy", [(2, 3), (0, 3)], "at least one row"),
        ("ssd", [(2, 3, 1, 4), (2, 3, 1, 4), (2, 3, 0, 4), (2, 3, 0)], "positive multiple"),
        ("taylor_attention", [(2, 3, 1, 0), (2, 3, 1, 0), (2, 3, 1, 4)], "K at least 1"),
        ("wkv7", [(2, 3, 1, 0)] * 3 + [(2, 3, 1, 4)] + [(2, 3, 1, 0)] * 2, "K at least 1"),
    ],
)
def test_inputs_without_heads_or_channels_are_refused(op: str, arguments: list[tuple[int, ...]], message: str):
    tensors = [torch.zeros(shape) for shape in arguments]
    if op == "linear_cross_entropy":
        tensors.append(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=message):
        getattr(PACKAGES[op], op)(*tensors)


def test_families_that_add_atomically_say_whether_they_give_the_same_bits_twice():
    root = Path(basecap.ops.__file__).parent
    adding = {path.parent for path in root.rglob("*.py") if "atomic_add(" in path.read_text()}
    found = {
        family.__name__.removeprefix("basecap.ops."): getattr(family, "REPEATS", None)
        for families in FAMILIES.values()
        for family in families.values()
        if Path(family.__file__).parent in adding or hasattr(family, "REPEATS")
    }
    assert found == {
        "top1_chunk.triton_kernels": True,
        "top1_chunk.gluon_kernels": True,
        "delta_rule.fla_kernels": False,
    }

"""Which library kernels run: by tensor, by version and card, by request; said once."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from basecap.ops import _dispatch, delta_rule, known_bad
from basecap.ops.delta_rule import fla_kernels
from tests.ops._recurrences import draw


@pytest.fixture(autouse=True)
def forget():
    _dispatch._log_once.cache_clear()
    fla_kernels._refusal.cache_clear()
    known_bad.known_bad_on.cache_clear()
    yield
    known_bad.known_bad_on.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes anything on any card."""
    monkeypatch.setattr(fla_kernels, "_installed", lambda device: None)


def on_card(*shape: int, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """Return what a decision sees of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype, shape=shape)


def test_versions_and_card_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fla_kernels.importlib.util, "find_spec", lambda name: name)
    for module in (fla_kernels, known_bad):
        monkeypatch.setattr(module, "version", {"fla-core": "0.6.0", "triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    v = on_card(2, 5, 3, 64)
    assert "triton 3.6.0" in fla_kernels.unsupported(v, None)
    monkeypatch.setattr(fla_kernels, "version", lambda name: importlib.metadata.version(f"no-{name}"))
    fla_kernels._refusal.cache_clear()
    assert "release of no-fla-core is unknown" in fla_kernels.unsupported(v, None)
    monkeypatch.setattr(fla_kernels.importlib.util, "find_spec", lambda name: None)
    fla_kernels._refusal.cache_clear()
    assert "basecap[gpu]" in fla_kernels.unsupported(v, None)


@pytest.mark.usefixtures("installed")
def test_tensors_the_library_does_not_take():
    assert fla_kernels.unsupported(torch.ones(1), None) == "the tensors are on cpu"
    assert "torch.float32" in fla_kernels.unsupported(on_card(1, dtype=torch.float32), None)
    assert "packed" in fla_kernels.unsupported(on_card(1), torch.zeros(1, 1))
    assert fla_kernels.unsupported(on_card(1, dtype=torch.float16), None) is None


KERNELS = "flash-linear-attention's kernels"
WIDTHS = "they are used for heads of 129 to 256 channels, not"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("channels", "ran_instead"),
    [
        (128, f"plain PyTorch: no Triton kernels because a reason; no {KERNELS} because {WIDTHS} 128"),
        (129, f"{KERNELS}: no Triton kernels because a reason"),
        (256, f"{KERNELS}: no Triton kernels because a reason"),
        (257, f"plain PyTorch: no Triton kernels because a reason; no {KERNELS} because {WIDTHS} 257"),
    ],
)
def test_only_wide_heads_of_the_delta_rule_need_it(channels: int, ran_instead: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v, beta = (draw(seed, 1, 3, 2, channels).float() for seed in range(4))
    taken = []
    monkeypatch.setattr(fla_kernels, "delta_rule", lambda *x: taken.append(x) or ("o", "final"))
    monkeypatch.setattr(fla_kernels, "unsupported", lambda v, segments: None)
    monkeypatch.setattr(fla_kernels.triton_kernels, "unsupported_by_triton", lambda x, **_: "a reason")
    monkeypatch.setattr(_dispatch, "_off_the_gpu", lambda x: None)
    with _dispatch.recorded() as ran:
        delta_rule.delta_rule(q, k, v, beta[..., 0])
    assert ran == {"delta_rule": ran_instead}
    assert [(x[0] is q, x[4]) for x in taken] == [(True, None)] * ran_instead.startswith(KERNELS)

"""What is asked of the machine."""

import contextlib
import ctypes
import platform
import warnings

import pytest
import torch

from basecap.errors import ConfigError
from basecap.run.executors import Resources, device_here
from basecap.system import environment


class Libc:
    """Remembers what it was told."""

    def __init__(self):
        self.told: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return 1


@pytest.mark.parametrize(("libc", "told"), [("glibc", [(-1, 2**31 - 1), (-3, 2**25)]), ("musl", []), ("", [])], ids=str)
def test_only_glibc_is_set_to_keep_memory(libc: str, told: list, monkeypatch: pytest.MonkeyPatch):
    fake = Libc()
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert environment.choose_device("cpu").type == "cpu"
    assert fake.told == told


def test_on_a_gpu_the_advice_to_round_float32_products_is_not_printed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    advice = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment.choose_device("cuda:0")
        for words in (advice, "something else"):
            warnings.warn(words, stacklevel=1)
    assert [str(one.message) for one in caught] == ["something else"]


@pytest.mark.parametrize(
    ("visible", "built", "found"), [(None, "13.0", True), ("1", "13.0", True), ("", "13.0", False), (None, None, False)]
)
def test_gpus_that_pytorch_cannot_use_are_no_reason_to_train_on_the_cpu(visible, built, found, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "nvidiactl").touch()
    assert not environment.has_unusable_gpus()
    (tmp_path / "nvidia0").touch()
    assert environment.has_unusable_gpus() == found
    with (
        pytest.raises(ConfigError, match="PyTorch can use none of this machine") if found else contextlib.nullcontext()
    ):
        assert device_here(Resources()).type == "cpu"
    assert device_here(Resources(device="cpu")).type == "cpu"


def test_the_code_that_trains_is_part_of_the_version(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def version() -> str:
        environment._code_digest.cache_clear()
        return environment.describe(torch.device("cpu"))["basecap"]

    real = version()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "system" / "environment.py"))
    for folder in ("ops", "report"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    before = version()
    (tmp_path / "report/module.py").write_text("x = 2\n")
    assert version() == before != real
    (tmp_path / "ops/module.py").write_text("x = 2\n")
    assert version() != before and version().startswith("0.1.0+")
    environment._code_digest.cache_clear()

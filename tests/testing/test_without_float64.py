"""A device without float64, such as an Apple GPU: here the CPU, where float64 is seen but not to be used."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basecap.errors import ConfigError
from basecap.mixers import _parts
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.names import check_checked_device_name, check_device_name
from basecap.ops import _sums
from basecap.system.environment import choose_checked_device
from basecap.testing.check_op import OPS, check_op
from tests._architectures import one_of_each_kind

CPU = torch.device("cpu")


class Watch(TorchDispatchMode):
    """Remembers the operations that return float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
            self.seen.add(str(function))
        return found


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sums, "WITHOUT_FLOAT64", frozenset({"cpu"}))


def test_plain_pytorch_of_every_op_uses_none():
    generator, used = torch.Generator().manual_seed(0), {}
    for name, case in OPS.items():
        inputs = case.inputs(lambda *shape: torch.randn(shape, generator=generator), 40).values()
        leaves = [x.clone().requires_grad_() for x in inputs]
        with Watch() as watch:
            outputs = case.plain(*leaves)
            first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
            first.float().square().sum().backward()
        used[name] = watch.seen
    assert len(used) > 10 and {name: seen for name, seen in used.items() if seen} == {}


def test_no_architecture_uses_any_in_training_and_in_decoding(monkeypatch: pytest.MonkeyPatch):
    used = {}
    # Of these angles even such a device gets the exact ones, from the CPU.
    monkeypatch.setattr(_parts, "_rotary_table", _parts._rotary_table_once)
    for name in one_of_each_kind():
        model = LanguageModel(model_config(name, hidden=32, vocab=31, layers=2, max_length=16)).initialise(0)
        tokens = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(0))
        with Watch() as watch:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            with torch.no_grad():
                caches = model.init_cache(2, 16)
                model.prefill(tokens[:, :8], caches)
                model.step(tokens[:, 8:9], caches)
        used[name] = watch.seen
    assert len(used) > 20 and {name: seen for name, seen in used.items() if seen} == {}


def test_an_op_is_compared_with_what_the_cpu_computes():
    rows = check_op("ssd", CPU)
    assert len(rows) > 10 and {row["result"] for row in rows} == {"passed"}


def test_only_the_check_takes_an_apple_gpu(monkeypatch: pytest.MonkeyPatch):
    assert check_checked_device_name("mps") == "mps" and check_checked_device_name("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"^device 'mps' is only for basecap check, as nothing else has been tried"):
        check_device_name("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^device 'mps' does not exist: PyTorch finds no Apple GPU here; leave out"):
        choose_checked_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_checked_device("mps") == torch.device("mps") and choose_checked_device("cpu") == CPU

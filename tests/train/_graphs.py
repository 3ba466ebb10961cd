"""Small trainers for the tests of CUDA graphs, and a stand-in for the memory of these graphs on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.distributed import Processes
from basecap.train.loop import Trainer
from basecap.train.placement import DevicePlacement
from tests.recorded_graph import Refusing, recorded
from tests.train.conftest import BATCH, LENGTH, UnevenStream, config

#: Tokens of a step.
STEP = BATCH * LENGTH
#: Architectures whose kernels differ in kind.
KINDS = ("transformer++", "mamba-2", "rwkv-7", "top1-chunk-exact", "deltanet")


def small(name: str = "transformer++") -> LanguageModel:
    return LanguageModel(model_config(name, hidden=32, vocab=31, layers=1, max_length=LENGTH)).initialise(0)


def trainer_of(model, path, device="cpu", stream=None, **options) -> Trainer:
    placement = DevicePlacement.choose(torch.device(device), Processes(), "auto")
    workload, records = stream or UnevenStream(), RunRecords(path)
    return Trainer(model, config(**options), 0, workload=workload, records=records, placement=placement)


def read_back(module, given, output: Tensor) -> Tensor:
    """A hook for a module: what it returns depends on a number read back."""
    return output * (1.0 if output.sum().item() < 1e9 else 2.0)


class RecordedPool:
    """See `basecap.system.cuda_graph.GraphPool`.

    Attributes:
        taken: bytes that a step is said to take.
        captures: number of captures of all pools.
    """

    taken, captures = 100, 0

    def rehearse(self, run: Callable):
        with Refusing():
            return run(), self.taken

    def room(self) -> int:
        return 1000

    def capture(self, run: Callable) -> Callable[[], None]:
        RecordedPool.captures += 1
        return recorded(run)

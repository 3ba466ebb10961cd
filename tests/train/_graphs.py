"""Small trainers for the tests of CUDA graphs, and a stand-in for these graphs on a CPU.

It repeats the operations that it saw, on the same tensors and numbers. As with a CUDA graph, a capture leaves every
tensor as it was, what Python computes in it is frozen, and reading a number back is an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.train.distributed import Processes
from basecap.train.loop import Trainer
from basecap.train.placement import DevicePlacement
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


def _written(function, args, kwargs) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    found = []
    for index, argument in enumerate(function._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


class _Recorder(TorchDispatchMode):
    """Notes each operation and its results, and what was in the tensors that it writes to."""

    def __init__(self, watch_only: bool = False):
        super().__init__()
        self.watch_only = watch_only
        self.calls: list[tuple] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing.\nSearch for more.")
        if self.watch_only:
            return function(*args, **kwargs)
        self.before += [(tensor, tensor.clone()) for tensor in _written(function, args, kwargs)]
        results = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, results))
        return results

    def undo(self) -> None:
        for tensor, values in reversed(self.before):
            tensor.copy_(values)
        self.before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, results in self.calls:
            for held, found in zip(tree_leaves(results), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != found.data_ptr():
                    held.copy_(found)


class RecordedPool:
    """See `basecap.system.cuda_graph.GraphPool`.

    Attributes:
        taken: bytes that a step is said to take.
        captures: number of captures of all pools.
    """

    taken, captures = 100, 0

    def rehearse(self, run: Callable):
        with _Recorder(watch_only=True):
            return run(), self.taken

    def room(self) -> int:
        return 1000

    def capture(self, run: Callable) -> Callable[[], None]:
        RecordedPool.captures += 1
        recorder = _Recorder()
        try:
            with recorder:
                run()
        finally:
            with torch.no_grad():
                recorder.undo()
        return recorder.replay

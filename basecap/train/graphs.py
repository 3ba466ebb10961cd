"""Training steps as CUDA graphs, because small steps wait for Python to launch their kernels.

The first steps of each shape are ordinary ones: they compile, tune and create the optimiser's state, and count like
any other, so nothing has to be restored. The last of them shows whether a graph can be made: it reads no number back
from the GPU, and its memory leaves room for evaluations. Then two graphs are captured, which computes nothing: the
gradients with clipping, and the update. A replay launches the kernels of the ordinary step in their order, so the
numbers are the same.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from basecap.data.workload import Batch
from basecap.errors import ConfigError
from basecap.system.cuda_graph import ROOM, WARM_UP, GraphPool
from basecap.train.config import TrainConfig
from basecap.train.optim import can_be_captured, capturable, hold_learning_rates
from basecap.train.placement import DevicePlacement
from basecap.train.step import LaunchedStep, TrainingStep

Result = TypeVar("Result")
Shapes = tuple[torch.Size, ...]


class Pool(Protocol):
    """What captures graphs, see `GraphPool`."""

    def rehearse(self, run: Callable[[], Result]) -> tuple[Result, int]:
        """See `GraphPool`."""

    def room(self) -> int:
        """See `GraphPool`."""

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """See `GraphPool`."""


class _Graphs(NamedTuple):
    """The graphs of one shape, and the tensors that they read (`parts`, `shares`) and write."""

    parts: list[Batch]
    shares: list[Tensor]
    losses: Tensor
    norm: Tensor
    found: list[Tensor | None]
    gradients: Callable[[], None]
    update: Callable[[], None]


class GraphedStep(TrainingStep):
    """A step that is replayed from graphs for each shape of a batch, once `WARM_UP` steps of that shape are taken.

    Attributes:
        log: called with a sentence if the step is not captured.
    """

    def __init__(self, step: LaunchedStep, *, insist: bool, pool: Callable[[], Pool] = GraphPool):
        """Take the step.

        Args:
            step: what is captured.
            insist: raise ConfigError where the step cannot be captured, and do not ask for room; else go on without.
            pool: makes what captures graphs.
        """
        self.log: Callable[[str], None] = lambda words: None
        self._step, self._insist, self._new_pool = step, insist, pool
        self._parameters = list(step.model.parameters())
        self._updates = can_be_captured(step.optimiser)
        if self._updates:
            hold_learning_rates(step.optimiser)
        self._taken: Counter[Shapes] = Counter()
        self._refused: str | None = None
        self._captured = False
        self.forget()

    @property
    def record(self) -> str | None:
        """What run.json says: "step", "gradients" without the update, "none: " with the reason; None before that."""
        if self._refused is not None:
            return f"none: {self._refused}"
        return ("step" if self._updates else "gradients") if self._captured else None

    def forget(self) -> None:
        """See `TrainingStep`: the graphs write to the old tensors."""
        self._graphs: dict[Shapes, _Graphs] = {}
        self._current: _Graphs | None = None
        self._pool = self._new_pool()

    def gradients(self, parts: Sequence[Batch], shares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See `TrainingStep`; raises ConfigError, see above."""
        shapes = tuple(part.inputs.shape for part in parts)
        if self._refused is None and shapes not in self._graphs:
            self._taken[shapes] += 1
            if self._taken[shapes] == WARM_UP:
                self._current = None
                return self._rehearse(parts, shares)
            if self._taken[shapes] > WARM_UP:
                self._capture(shapes, parts, shares)
        self._current = graphs = self._graphs.get(shapes)
        if graphs is None:
            return self._step.gradients(parts, shares)
        for own, part in zip(graphs.parts, parts, strict=True):
            own.inputs.copy_(part.inputs)
            own.targets.copy_(part.targets)
        for held, share in zip(graphs.shares, shares, strict=True):
            held.copy_(share)
        for parameter, gradient in zip(self._parameters, graphs.found, strict=True):
            parameter.grad = gradient
        graphs.gradients()
        return graphs.losses, graphs.norm

    def update(self) -> None:
        """See `TrainingStep`."""
        (self._step if self._current is None else self._current).update()

    def _rehearse(self, parts: Sequence[Batch], shares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Take an ordinary step, and give graphs up if it cannot be captured."""
        try:
            result, taken = self._pool.rehearse(lambda: self._step.gradients(parts, shares))
        except RuntimeError as error:
            self._refuse(error)
            return self._step.gradients(parts, shares)
        room = self._pool.room()
        if taken > ROOM * room and not self._insist:
            self._give_up(f"a step takes {taken / 2**30:.1f} GiB, more than half of the {room / 2**30:.1f} GiB free")
        return result

    def _capture(self, shapes: Shapes, parts: Sequence[Batch], shares: Sequence[Tensor]) -> None:
        """Capture the step for these shapes."""
        own = [Batch(part.inputs.clone(), part.targets.clone()) for part in parts]
        scales = [share.clone() for share in shares]
        results: list[tuple[Tensor, Tensor]] = []
        self._step.optimiser.zero_grad(set_to_none=True)  # so that the graph has room for its own
        try:
            gradients = self._pool.capture(lambda: results.append(self._step.gradients(own, scales)))
            found = [parameter.grad for parameter in self._parameters]
            update = self._step.update
            if self._updates:
                with capturable(self._step.optimiser):
                    update = self._pool.capture(self._step.update)
        except RuntimeError as error:
            self._refuse(error)
            return
        self._graphs[shapes] = _Graphs(own, scales, *results[0], found, gradients, update)
        self._captured = True

    def _refuse(self, error: RuntimeError) -> None:
        """Give graphs up; where they are insisted on, raise the error for lack of memory, ConfigError for others."""
        lacks_memory = "out of memory" in str(error)
        reason = "out of memory" if lacks_memory else (str(error).strip() or type(error).__name__).splitlines()[0]
        if self._insist:
            if lacks_memory:
                raise error
            raise ConfigError(
                f"the training step cannot be captured as a CUDA graph ({reason.rstrip('.')}); set "
                "train.cuda_graphs=false."
            ) from error
        self._give_up(reason.rstrip("."))

    def _give_up(self, reason: str) -> None:
        self._refused = reason
        self.forget()
        self.log(f"steps are not CUDA graphs: {reason}.")


def graphed(step: LaunchedStep, config: TrainConfig, placement: DevicePlacement) -> GraphedStep | None:
    """Return the step as CUDA graphs where `train.cuda_graphs` asks for them: on a GPU that one process trains on."""
    if config.cuda_graphs is False or placement.device.type != "cuda" or placement.processes.world > 1:
        return None
    return GraphedStep(step, insist=config.cuda_graphs is True)

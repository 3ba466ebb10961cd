"""Forward and backward passes as CUDA graphs, because small steps wait for Python to launch their kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.data.workload import Batch
from basecap.errors import ConfigError
from basecap.system.cuda_graph import captured


class _Graph(NamedTuple):
    """A captured pass: it reads `batch` and `share`, writes `loss` and adds to the gradients."""

    batch: Batch
    share: Tensor
    loss: Tensor
    replay: Callable[[], None]


class GradientGraphs:
    """Forward and backward passes of micro-batches, replayed from one CUDA graph for each shape.

    A graph launches the kernels of a pass without one, so the numbers are the same. Gradients keep their memory: clear
    them with zeros, not with None. Each shape takes the memory of its activations.
    """

    def __init__(
        self,
        backward: Callable[[Batch, Tensor], Tensor],
        capture: Callable[[Callable[[], object]], Callable[[], None]] = captured,
    ):
        """Take the pass: it adds to the gradients and returns the loss, both scaled by its second argument, a scalar.

        `capture` returns the replay of what it is given.
        """
        self._backward = backward
        self._capture = capture
        self._graphs: dict[torch.Size, _Graph] = {}

    def prepare(self, batch: Batch, share: Tensor) -> None:
        """Capture the pass for the shape of a batch, if that is new; this changes the gradients.

        Raises ConfigError if the pass cannot be captured, as one that reads numbers back from the GPU.
        """
        if batch.inputs.shape in self._graphs:
            return
        own = Batch(batch.inputs.clone(), batch.targets.clone())
        scale, loss = share.clone(), torch.zeros_like(share)
        try:
            replay = self._capture(lambda: loss.copy_(self._backward(own, scale)))
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"the training step cannot be captured as a CUDA graph ({reason}); set train.cuda_graphs=false."
            ) from error
        self._graphs[batch.inputs.shape] = _Graph(own, scale, loss, replay)

    def __call__(self, batch: Batch, share: Tensor) -> Tensor:
        """Run the pass for a batch whose shape is prepared; return its loss, valid until the next pass."""
        graph = self._graphs[batch.inputs.shape]
        graph.batch.inputs.copy_(batch.inputs)
        graph.batch.targets.copy_(batch.targets)
        graph.share.copy_(share)
        graph.replay()
        return graph.loss

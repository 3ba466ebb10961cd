"""Passes of evaluations as CUDA graphs, because a GPU runs a pass of a small model before Python has launched it.

The first passes of each shape are ordinary ones; the last of them shows whether a graph can be made. A replay launches
the kernels of an ordinary pass in their order, so the numbers are the same. That is compared with an ordinary pass at
the first replay and, as weights change meanwhile, at the 2nd, 4th, 8th, ...
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.errors import TrainingError
from basecap.models.language_model import LanguageModel
from basecap.system.cuda_graph import ROOM, WARM_UP, GraphPool


class _Graph(NamedTuple):
    """The graph of one shape, and the tensors that it reads and writes."""

    batch: Tensor
    losses: Tensor
    replay: Callable[[], None]


class ReplayedPasses:
    """The passes of one compiled model, replayed for each shape of a batch once `WARM_UP` of that shape were made.

    The weights of the model may change meanwhile, in place.
    """

    def __init__(
        self,
        model: LanguageModel,
        log: Callable[[str], None] = lambda words: None,
        pool: Callable[[], GraphPool] = GraphPool,
    ):
        """Take the model.

        Args:
            model: on its device.
            log: takes a sentence if its passes cannot be captured.
            pool: makes what captures them.
        """
        self.model = model
        self._device = model.embedding.weight.device
        self._log, self._pool = log, pool()
        self._made: Counter[torch.Size] = Counter()
        self._graphs: dict[torch.Size, _Graph] = {}
        self._refused = False

    def serves(self, model: LanguageModel) -> bool:
        """Return whether passes of a model are replayed: those of this one, without hooks, which no replay calls."""
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return model is self.model and not hooked

    def losses(self, run: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        """Return what `run`, always the same function of a batch on the device, finds; valid until the next call.

        Args:
            run: computes the losses of the model.
            batch: on the host, in pinned memory.

        Raises:
            TrainingError: a later replay is found to have other bits than an ordinary pass.
        """
        shape = batch.shape
        self._made[shape] += 1
        if not self._refused and self._made[shape] == WARM_UP:
            return self._rehearse(run, batch)
        if not self._refused and self._made[shape] > WARM_UP and shape not in self._graphs:
            self._capture(run, shape)
        graph = self._graphs.get(shape)
        if graph is None:
            return run(batch.to(self._device, non_blocking=True))
        graph.batch.copy_(batch, non_blocking=True)
        graph.replay()
        replays = self._made[shape] - WARM_UP
        return graph.losses if replays & (replays - 1) else self._compared(run, graph, first=replays == 1)

    def _compared(self, run: Callable[[Tensor], Tensor], graph: _Graph, *, first: bool) -> Tensor:
        """Return what an ordinary pass finds; if the first replay differs, give graphs up."""
        losses = run(graph.batch)
        if not torch.equal(losses.nan_to_num(), graph.losses.nan_to_num()):
            if not first:
                raise TrainingError(
                    "a replayed evaluation pass differs from an ordinary one, so earlier ones may be wrong, too; "
                    "start again with --set train.cuda_graphs=false"
                )
            self._give_up(RuntimeError("a replay differs from an ordinary pass"))
        return losses

    def _rehearse(self, run: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        """Make an ordinary pass, and give graphs up if it cannot be captured or leaves too little memory."""
        given = batch.to(self._device, non_blocking=True)
        try:
            losses, taken = self._pool.rehearse(lambda: run(given))
        except RuntimeError as error:
            self._give_up(error)
            return run(given)
        if taken > ROOM * self._pool.room():
            self._give_up(RuntimeError(f"a pass takes {taken / 2**30:.1f} GiB, more than half of the free memory"))
        return losses

    def _capture(self, run: Callable[[Tensor], Tensor], shape: torch.Size) -> None:
        """Capture a pass of a shape."""
        batch, found = torch.zeros(shape, dtype=torch.int64, device=self._device), list[Tensor]()
        try:
            replay = self._pool.capture(lambda: found.append(run(batch)))
        except RuntimeError as error:
            self._give_up(error)
        else:
            self._graphs[shape] = _Graph(batch, found[0], replay)

    def _give_up(self, error: RuntimeError) -> None:
        self._refused = True
        self._graphs.clear()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        self._log(f"evaluation passes are not CUDA graphs: {reason}.")

"""How many runs share a GPU with `--per-device auto`: what one training step takes of its memory and of its rate."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from basecap.plan.estimate import matrix_rate
from basecap.plan.runs import RunSpec, costs
from basecap.run.jobs import CONTEXT, free_memory, obtainable
from basecap.run.trial import build, in_memory, training_step
from basecap.testing.subject import undisturbed
from basecap.train.distributed import Processes
from basecap.train.placement import DevicePlacement

#: The most runs that share a GPU, whatever room they leave: each is a process with a thread that starts kernels.
MOST = 8
#: Share of a GPU's free memory that runs may plan with: fragments take the rest.
USABLE = 0.95


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a training step of one run takes of a GPU.

    Attributes:
        memory: bytes at most at a time, without `CONTEXT`.
        share: its rate as a share of the GPU's rate of matrix products.
        free: bytes of the GPU that other processes leave.
    """

    memory: int
    share: float
    free: int


def measure(run: RunSpec, device: torch.device) -> Footprint:
    """Train two steps of a run on a GPU that does nothing else, and time the second.

    They are not compiled, unless they find too little memory otherwise. Compiled steps take less of the memory and
    reach more of the rate, so the count of runs is cautious.
    """
    return in_memory(run, device, partial(_measure, run, device))


def _measure(run: RunSpec, device: torch.device, compiled: bool) -> Footprint:
    placement = DevicePlacement.choose(device, Processes(), run.train.precision)
    (cost,) = costs([run])
    with undisturbed(device):
        torch.cuda.reset_peak_memory_stats(device)
        model, optimiser = build(run, device, compiled=compiled)
        seconds, kept = 0.0, 0
        for _ in range(2):  # the first chooses kernels and allocates memory
            torch.cuda.synchronize(device)
            since = time.perf_counter()
            training_step(model, optimiser, run, placement)
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - since
            kept = torch.cuda.memory_allocated(device)
        memory = torch.cuda.max_memory_allocated(device)
        if run.train.cuda_graphs is not False:  # they keep the memory of a step, beside which evaluations need theirs
            memory += memory - kept
        del model, optimiser
        rate = matrix_rate(device)
    free_memory(device)
    work = cost.flops / cost.steps * run.train.forward_batch(1) / run.train.batch
    free, _ = obtainable(device)
    return Footprint(memory=memory, share=work / seconds / rate, free=free)


def choose(found: Sequence[Footprint], runs: int, gpus: int) -> tuple[int, str]:
    """Return how many runs share a GPU, and why in a sentence.

    It is the least of: what fits where all are as large as the largest; how often the mean share of the matrix rate
    fits into 1, rounded up; the runs for each GPU; `MOST`.

    >>> one = Footprint(memory=12 * 2**30, share=0.3, free=80 * 2**30)
    >>> choose([one], runs=40, gpus=2)[0], choose([one], runs=3, gpus=2)[0]
    (4, 2)
    """
    largest = max(footprint.memory for footprint in found)
    free = min(footprint.free for footprint in found)
    share = sum(footprint.share for footprint in found) / len(found)
    room = int(USABLE * free / (largest + CONTEXT))
    count = max(1, min(room, math.ceil(1 / share), -(-runs // gpus), MOST))
    many = f"{count} runs share each GPU" if count > 1 else "one run at a time on each GPU"
    return count, (
        f"{many} (--per-device auto): in a trial step one reaches {100 * share:.0f} % of the rate of matrix products "
        f"and takes at most {largest / 2**30:.1f} of {free / 2**30:.0f} GiB that are free."
    )

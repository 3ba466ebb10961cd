"""The cases of the recurrence of RWKV-7: decays of any strength, and bounded ones."""

import torch.nn.functional as F
from torch import Tensor

from basecap.ops.cases import B, Case, Draw, Function, H, K
from basecap.ops.wkv7 import FAMILIES, eager, reference, wkv7, wkv7_bounded

FUNCTIONS = ("wkv7",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    # As RWKV-7 makes them: log decays of at least -exp(-1/2), b is minus a times a rate in 0..1.
    r, decay, k, v, rate = (draw(B, T, H, K) for _ in range(5))
    a = -F.normalize(draw(B, T, H, K), dim=-1)
    return {"r": r, "log_decay": -0.6 * decay.sigmoid(), "k": k, "v": v, "a": a, "b": -a * rate.sigmoid()}


def _case(op: Function, *, half: bool) -> Case:
    return Case(
        kernels=op,
        plain=eager.wkv7,
        definition=reference.wkv7,
        inputs=_inputs,
        cuda=True,
        half=half,
        families=FAMILIES,
    )


CASES = {"wkv7": _case(wkv7, half=False), "wkv7 bounded": _case(wkv7_bounded, half=True)}

"""The cases of the delta rule: one decay for each head, and one for each channel."""

import torch.nn.functional as F
from torch import Tensor

from basecap.ops import wkv7
from basecap.ops.cases import B, Case, Draw, H, K, by_backend
from basecap.ops.delta_rule import FAMILIES, by_channel, channel_delta_rule, delta_rule, reference

FUNCTIONS = ("delta_rule",)


def _inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": draw(B, T, H, K),
        "beta": draw(B, T, H).sigmoid(),
        "log_decay": -0.1 * draw(B, T, H).abs(),
    }


def _channel_inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    return _inputs(draw, T) | {"log_decay": -0.1 * draw(B, T, H, K).abs()}


def _plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    r, log_decay, written, a, b = by_channel(q, k, beta, log_decay)
    return wkv7.eager.wkv7(r, log_decay, written, v, a, b)


CASES = {
    "delta rule": by_backend(delta_rule, reference.delta_rule, _inputs, FAMILIES, ("beta", "log_decay")),
    "delta rule by channel": Case(
        kernels=channel_delta_rule,
        plain=_plain,
        definition=reference.delta_rule,
        inputs=_channel_inputs,
        wide=("beta", "log_decay"),
        cuda=True,
        families=wkv7.UNBOUNDED,
    ),
}

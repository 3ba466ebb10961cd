"""The cases of the delta rule: one decay for each head, one for each channel, and erasing strengths by channel."""

import torch.nn.functional as F
from torch import Tensor

from basecap.ops import wkv7
from basecap.ops.cases import B, Case, Draw, H, K, by_backend
from basecap.ops.delta_rule import FAMILIES, channel_delta_rule, channels, decoupled_delta_rule, delta_rule, reference

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


def _decoupled_inputs(draw: Draw, T: int) -> dict[str, Tensor]:
    q, k, v, _, log_decay = _channel_inputs(draw, T).values()
    return {"q": q, "k": k, "v": v, "erase": draw(B, T, H, K).sigmoid(), "log_decay": log_decay}


def _plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    return channels.channel_delta_rule(q, k, (beta[..., None] * v).to(v.dtype), beta[..., None] * k, log_decay)


def _plain_decoupled(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    return channels.channel_delta_rule(q, k, v, erase * k, log_decay)


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
    "delta rule, decoupled": Case(
        kernels=decoupled_delta_rule,
        plain=_plain_decoupled,
        definition=reference.decoupled_delta_rule,
        inputs=_decoupled_inputs,
        wide=("erase", "log_decay"),
        cuda=True,
        families=wkv7.UNBOUNDED,
    ),
}

"""Checks of the initialisation: whole language models of the published depths, with small widths.

The input of a block is normalised, so its output is of at most unit size: L blocks amplify activations at most 1 + L
times, and a relative change of the first activations changes the loss at most 1 + L times as much as one of the last.
Branches that are not scaled down with depth make activations grow in proportion to it, if all agree; twice that is
allowed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from basecap.mixers import ARCHITECTURES
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.names import split_backbone
from basecap.testing._harness import BATCH, SEED, Check, judge, tiny_options

#: Numbers of blocks; the others are compared with the first.
DEPTHS = (12, 24, 48)
LENGTH, VOCAB = 16, 64
#: Longest sequence of the models: options may ask for several chunks of it.
LONGEST = 64
#: The usual remedies.
START = "start the projection into the residual stream with normal(residual_std(layer)) in recipe()"
NORM = "where a norm divides by values far below 1, give it a larger eps"


@dataclass(frozen=True, kw_only=True)
class FreshModel:
    """Measurements of a freshly initialised model on random tokens.

    Attributes:
        loss: in nats per token.
        first, last: root mean square of the activations before the first and after the last block.
        sensitivity: of the loss to a relative change of the first activations, over that to one of the last.
        broken: names of the parameters whose gradient is not finite.
    """

    loss: float
    first: Tensor
    last: Tensor
    sensitivity: Tensor
    broken: list[str]


def initialisation(name: str, hidden: int, device: torch.device, options: Mapping[str, Any]) -> Iterator[Check]:
    """Freshly initialised models of 12, 24 and 48 blocks have finite activations of moderate size and guess uniformly.

    Args:
        name: of a registered architecture, in its own backbone or, as "X in Y", in backbone Y.
        hidden: model width.
        device: where to run.
        options: of the mixers, on top of the architecture's and of `Mixer.tiny`.
    """
    use, backbone = split_backbone(name)
    tiny = {k: v for choice in ARCHITECTURES.get(use).layers for k, v in tiny_options(choice, hidden).items()}
    layer = LayerConfig(use=use, mixer={**tiny, **options})
    config = model_config(use, hidden=hidden, vocab=VOCAB, pattern=(layer,), backbone=backbone, max_length=LONGEST)
    usual = torch.tensor(math.nan)
    for depth in DEPTHS:
        model = LanguageModel(config.model_copy(update={"depth": depth})).initialise(SEED).to(device)
        start = _start(model)
        usual = start.last if depth == DEPTHS[0] else usual
        for what, error, allowed, broken in (
            # Logits of unit variance add half a nat to the logarithm of the vocabulary.
            ("loss", abs(start.loss - math.log(VOCAB)), 0.5, "the loss is not that of a uniform guess"),
            ("activations", start.last, 1.0 + depth, f"the blocks amplify their normalised inputs; {START}"),
            ("fading", start.first / start.last, 1.0 + depth, "the blocks lose the embeddings"),
            (
                "growth",
                start.last / usual,
                2 * depth / DEPTHS[0],
                f"activations outgrow those of {DEPTHS[0]} layers; {START}",
            ),
            ("gradients", start.sensitivity, 1.0 + depth, f"the blocks amplify gradients; {NORM}"),
            ("fading gradients", 1 / start.sensitivity, 1.0 + depth, "the blocks lose gradients"),
            ("parameters", len(start.broken), 0.0, f"no finite gradient for {', '.join(start.broken)}"),
        ):
            yield judge(name, f"initialised {what}, {depth} layers", float(error), allowed, broken)


def _start(model: LanguageModel) -> FreshModel:
    stream: list[Tensor] = []
    for module in (model.blocks[0], model.norm):
        module.register_forward_pre_hook(lambda module, inputs: stream.append(inputs[0]))
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator).to(model.embedding.weight.device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    parameters = dict(model.named_parameters())
    early, late, *grads = torch.autograd.grad(loss, [*stream, *parameters.values()], allow_unused=True)
    first, last = map(_size, stream)
    broken = [
        name for name, grad in zip(parameters, grads, strict=True) if grad is not None and not grad.isfinite().all()
    ]
    sensitivity = first * _size(early) / (last * _size(late))
    return FreshModel(loss=loss.item(), first=first, last=last, sensitivity=sensitivity, broken=broken)


def _size(x: Tensor) -> Tensor:
    return x.detach().double().square().mean().sqrt()

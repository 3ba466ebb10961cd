"""What the answers of a model lose when a layer cannot see the pair that is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel
from basecap.tasks import NOTHING, Instances, Role

#: Maximum number of pairs of an example that are hidden: each takes a pass of every mixer.
PAIRS = 8


class Hidden:
    """Which positions ask for which of the hidden pairs, and where these stand.

    Attributes:
        places: bool [P, N, T], the key and value tokens of each hidden pair.
        own: int64 [N, T], the number of the hidden pair that a scored position asks for, from 0; -1: none, or the
            position cannot see both that pair and the next hidden one.
        targets: int64 [N, T], the tokens to give.
    """

    def __init__(self, found: Instances, device: torch.device):
        """Take examples of several pairs, and the device of the masks."""
        count = int(found.pairs.max(initial=NOTHING)) + 1
        chosen = np.unique(np.linspace(0, count - 1, min(count, PAIRS)).round().astype(int))
        tokens = (found.roles == Role.KEY) | (found.roles == Role.VALUE)
        places = np.stack([(found.pairs == pair) & tokens for pair in chosen])
        # The next pair must be visible as well: it is hidden for comparison.
        whole = places.cumsum(axis=2) >= places.sum(axis=2, keepdims=True)
        asks = np.stack([(found.pairs == pair) & (found.groups != NOTHING) for pair in chosen])
        asks &= whole & np.roll(whole, -1, axis=0)
        own = np.where(asks.any(axis=0), asks.argmax(axis=0), NOTHING)
        parts = places, own, found.targets
        self.places, self.own, self.targets = (torch.from_numpy(part).to(device) for part in parts)


def right_answers(model: LanguageModel, found: Instances, device: torch.device) -> dict[int, NDArray[np.float64]]:
    """Return the share of right tokens of each example by layer, [N, 2]: own pair hidden, another pair hidden.

    A position that asks for a pair gets the output that the layer's mixer would have there if the mixer's input at the
    pair's keys and values were the mean input of the example. Other positions and layers are unchanged. The other pair
    is the next one, so that every pair is hidden as often as own pair as it is as other pair. Examples without a
    position that counts are left out.
    """
    hidden = Hidden(found, device)
    inputs = torch.from_numpy(found.inputs).to(device)
    asking = hidden.own != NOTHING
    kept = asking.any(1)
    by_layer = {}
    for mixer in [module for module in model.modules() if isinstance(module, Mixer)]:
        columns = []
        for shift in (0, 1):
            with _blinded(mixer, hidden, shift), torch.no_grad():
                right = asking & (model.logits(inputs).argmax(-1) == hidden.targets)
            columns.append((right.sum(1) / asking.sum(1).clamp(min=1))[kept])
        by_layer[mixer.layer.index] = torch.stack(columns, dim=1).double().cpu().numpy()
    return by_layer


@contextmanager
def _blinded(mixer: Mixer, hidden: Hidden, shift: int) -> Iterator[None]:
    """Hide from positions of a mixer the pair `shift` after the one that they ask for."""

    def hook(mixer: Mixer, given: tuple[Any, ...], output: Tensor) -> Tensor:
        x_BTD: Tensor = given[0]
        # A first layer leaves values for later ones in `shared`; what it computes here must not reach them.
        rest: list[Any] = [dict(part) if isinstance(part, dict) else part for part in given[1:]]
        mean, seen = x_BTD.mean(1, keepdim=True), output.clone()
        count = len(hidden.places)
        for pair, places in enumerate(hidden.places):
            changed = mixer.forward(torch.where(places[..., None], mean, x_BTD), *rest)
            asking = hidden.own == (pair - shift) % count
            seen[asking] = changed[asking].to(seen.dtype)
        return seen

    handle = mixer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()

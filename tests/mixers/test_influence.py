"""What influence shows of a model in half precision is what that model does: the same choices, the same weights."""

from contextlib import nullcontext

import pytest
import torch

from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, initialise
from tests._architectures import distinct_names

HALF = torch.bfloat16
OPTIONS = {
    "dsa": {"top": 12},
    "dsa by mass": {"top": 12},
    "nsa": {"block": 8, "top": 4, "window": 16},
    "top1-chunk-exact": {"chunk": 16},
    "top1-chunk-approx": {"chunk": 16},
    "transformer++ temperature": {"temperature": 0.05},
    "transformer++ window": {"window": 16},
}


def build(name: str) -> Mixer:
    """Return the first layer of an architecture, every parameter off its start."""
    choice = ARCHITECTURES.get(name).layers[0]
    mixer = choice.mixer(choice.configure(64, OPTIONS.get(name, {})), LayerSpec(hidden=64, index=1, depth=3))
    initialise(mixer, mixer.recipe(), 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return mixer


@pytest.mark.parametrize("mixed_precision", [True, False], ids=["autocast", "half"])
@pytest.mark.parametrize("name", distinct_names())
@torch.no_grad()
def test_influence_in_half_precision(name: str, mixed_precision: bool):
    mixer, x = build(name), torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(0))
    if not mixed_precision:
        mixer, x = mixer.to(HALF), x.to(HALF)
    with torch.autocast("cpu", HALF) if mixed_precision else nullcontext():
        found, mixed = mixer.influence(x), mixer.mixed(x)
        matrix = None if found is None else found.whole()
    if matrix is None or mixed is None:
        pytest.skip("has no influence matrix")
    v, y = (part.double() for part in mixed)
    error = (torch.einsum("bhts,bshv->bthv", matrix.double(), v) - y).abs().max() / y.abs().max()
    assert error < 0.02

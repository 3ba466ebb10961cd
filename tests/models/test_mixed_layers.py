"""Models of several mixers, and mixers in a backbone that is not their own, decode as they compute in training."""

import pytest
import torch

from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel

LENGTH, PROMPT = 80, 50


def layers(*uses: str) -> tuple[LayerConfig, ...]:
    small = {"transformer++": {"heads": 2}, "top1-chunk-exact": {"heads": 2, "chunk": 16}}
    return tuple(LayerConfig(use=use, mixer=small.get(use, {})) for use in uses)


@pytest.mark.parametrize(
    ("backbone", "pattern"),
    [
        ("transformer++", ["mamba-2", "mamba-2", "mamba-2", "top1-chunk-exact"]),
        ("rwkv-7", ["top1-chunk-exact"]),
        ("rwkv-7", ["rwkv-7", "transformer++"]),
    ],
)
def test_a_mixed_model_decodes_as_it_prefills(backbone: str, pattern: list[str]):
    config = model_config(backbone, hidden=64, vocab=50, layers=4, pattern=layers(*pattern), max_length=LENGTH)
    model = LanguageModel(config).initialise(0).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, LENGTH), generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, some branches are zero
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        logits, caches = model.logits(tokens), model.init_cache(2, LENGTH)
        found = [model.prefill(tokens[:, :PROMPT], caches)]
        found += [model.step(tokens[:, t : t + 1], caches) for t in range(PROMPT, LENGTH)]
        torch.testing.assert_close(torch.stack(found, dim=1), logits[:, PROMPT - 1 :])
        caches = model.init_cache(2, LENGTH)
        found = [model.step(tokens[:, t : t + 1], caches) for t in range(LENGTH)]
    torch.testing.assert_close(torch.stack(found, dim=1), logits)

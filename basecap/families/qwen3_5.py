"""Qwen3.5 in the layout of transformers, dense, such as Qwen/Qwen3.5-27B: the language model, without its pictures."""

from collections.abc import Iterator, Mapping

from basecap.errors import ConfigError
from basecap.families._contract import ModelFile, WeightRow, family, same
from basecap.families._hybrid import GatedHybrid
from basecap.models import LayerConfig

#: Our projections of Gated DeltaNet to theirs.
PROJECTIONS = {"memory.qkv": "in_proj_qkv", "gate": "in_proj_z", "memory.beta": "in_proj_b", "decay": "in_proj_a"}


@family("qwen3_5_text")
class QwenThreeFiveText(GatedHybrid):
    """A model of text alone."""

    def described(self, published: ModelFile) -> ModelFile:
        """Return all of it."""
        return published

    def linear_rows(self, kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
        """Yield the rows of the projections."""
        yield from _projections(mixer, layer)


@family("qwen3_5")
class QwenThreeFive(GatedHybrid):
    """A model of text and pictures, of which text is taken."""

    stem = "model.language_model"
    other_parts = ("mtp.", "model.visual.")

    def described(self, published: ModelFile) -> ModelFile:
        """Return the section of text; raises ConfigError where there is none."""
        text = published.values.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"config.json has text_config = {text!r}; give a folder where it is a section.")
        tied = {key: published.values[key] for key in ("tie_word_embeddings",) if key in published.values}
        return ModelFile({**text, **tied})

    def linear_rows(self, kind: LayerConfig, mixer: str, layer: str) -> Iterator[WeightRow]:
        """Yield the rows of the projections."""
        yield from _projections(mixer, layer)


def _projections(mixer: str, layer: str) -> Iterator[WeightRow]:
    for ours, theirs in PROJECTIONS.items():
        yield same(f"{mixer}.{ours}.weight", f"{layer}.{theirs}.weight")

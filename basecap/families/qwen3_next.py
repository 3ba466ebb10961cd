"""Qwen3-Next: said to be Gated DeltaNet, of which its layers are a kind, in a model that basecap does not have."""

from collections.abc import Iterator

from basecap.errors import ConfigError
from basecap.families._contract import Family, ModelFile, WeightRow, family
from basecap.models import ModelConfig


@family("qwen3_next")
class QwenThreeNext(Family):
    """Gated DeltaNet and gated attention, with experts."""

    def model(self, published: ModelFile) -> ModelConfig:
        """Raise ConfigError: there is no such model."""
        raise ConfigError(
            "qwen3_next has experts, gated attention and fewer key than value heads, which basecap lacks: only its "
            "gated-deltanet layers are of a known kind; import a model of another family."
        )

    def rows(self, model: ModelConfig) -> Iterator[WeightRow]:
        """Yield nothing."""
        yield from ()

"""The configuration of a language model, which is stored with every checkpoint."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from basecap.errors import ConfigError, nearest
from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, build_mixer
from basecap.models.backbones import BACKBONES
from basecap.options import configured
from basecap.tasks import Readout


class LayerConfig(BaseModel):
    """One entry of the layer pattern: an architecture by name and the options that differ from its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = Field(description="name of an architecture, see `basecap list mixers`")
    mixer: dict[str, Any] = Field(default_factory=dict, description="options of the mixer")


#: Options of a model that came after the first recorded ones, with their defaults.
LATER_DEFAULTS = (("canon", None), ("inner", None), ("eps", None), ("readout", "each"))


class ModelConfig(BaseModel):
    """A complete description of a language model; building it needs nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int = Field(ge=1, le=2**20, description="model width")
    vocab: int = Field(ge=2, le=2**31, description="vocabulary size")
    depth: int = Field(ge=1, description="number of blocks")
    backbone: str = Field(description="backbone, see `basecap list backbones`")
    layers: tuple[LayerConfig, ...] = Field(min_length=1, description="pattern, repeated over the blocks")
    tied: bool = Field(True, description="the head is the transposed embedding")
    max_length: int = Field(2048, ge=1, description="longest training sequence in tokens")
    canon: str | None = Field(
        None, pattern="^a?b?c?d?$", description="places of Canon layers, a to d; those of the architectures when None"
    )
    inner: int | None = Field(None, ge=1, description="width inside feed-forward layers; that of the backbone if null")
    eps: float | None = Field(None, gt=0, description="epsilon of the norms; that of the backbone if null")
    readout: Readout = Field("each", description="last: a decoder answers at every position from the last one")

    @model_serializer(mode="wrap")
    def _as_recorded(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults of options that recorded models and the hashes of their runs do not have."""
        content: dict[str, Any] = serialise(self)
        return {key: value for key, value in content.items() if (key, value) not in LATER_DEFAULTS}

    def build_mixers(self) -> list[Mixer]:
        """Build one mixer per block; raises ConfigError for options that do not fit and unfinished mixers."""
        self._check_canon()
        mixers = []
        for index in range(self.depth):
            layer = self.layers[index % len(self.layers)]
            choices, places = ARCHITECTURES.get(layer.use).layers, self._canon(layer)
            choice = choices[index % len(choices)]
            known = {key for other in choices for key in other.mixer.Config.model_fields}
            for key in layer.mixer:
                if key not in known:
                    raise ConfigError(f"unknown option {key!r} of {layer.use!r}: {nearest(key, known)}")
            own = {key: value for key, value in layer.mixer.items() if key in choice.mixer.Config.model_fields}
            if "b" in places and "canon" in choice.mixer.Config.model_fields:
                own = {"canon": True, **own}
            spec = LayerSpec(
                hidden=self.hidden,
                index=index,
                depth=self.depth,
                max_length=self.max_length,
                canon=places,
                inner=self.inner,
            )
            mixers.append(build_mixer(choice.mixer, choice.configure(self.hidden, own), spec))
        return mixers

    @property
    def ngram(self) -> int:
        """Tokens of the n-grams that are embedded beside each token, 0 for none; ConfigError where layers disagree."""
        orders = {n: layer.use for layer in self.layers if (n := ARCHITECTURES.get(layer.use).ngram)}
        if len(orders) > 1:
            asked = " and ".join(f"{n} ({use})" for n, use in sorted(orders.items()))
            raise ConfigError(f"a model has n-grams of one length, and its layers ask for {asked} tokens; use one.")
        return next(iter(orders), 0)

    def _canon(self, layer: LayerConfig) -> str:
        """Return the places of Canon layers in a block of the pattern."""
        return ARCHITECTURES.get(layer.use).canon if self.canon is None else self.canon

    def _check_canon(self) -> None:
        """Raise ConfigError for places of Canon layers that the model does not have."""
        asked = {place for layer in self.layers for place in self._canon(layer)}
        if asked & {"c", "d"} and BACKBONES.get(self.backbone).feed_forward is None:
            raise ConfigError(
                f"blocks of backbone {self.backbone!r} have no feed-forward layer, so there are no places c and d for "
                "Canon layers; use canon: a."
            )
        mixers = [choice.mixer for layer in self.layers for choice in ARCHITECTURES.get(layer.use).layers]
        if "b" in asked and not any("canon" in mixer.Config.model_fields for mixer in mixers):
            named = ", ".join(dict.fromkeys(layer.use for layer in self.layers))
            raise ConfigError(
                f"place b of Canon layers is between projection and positions of attention, which {named} does not "
                "have; leave out b."
            )


def model_config(
    use: str,
    *,
    hidden: int,
    vocab: int,
    layers: int | None = None,
    pattern: tuple[LayerConfig, ...] | None = None,
    backbone: str | None = None,
    tied: bool | None = None,
    max_length: int = 2048,
) -> ModelConfig:
    """Return the configuration of architecture `use` at a size.

    Args:
        use: name of the architecture; gives the backbone, and the mixers unless `pattern` does.
        hidden: model width.
        vocab: vocabulary size.
        layers: depth in Transformer layers (a backbone whose blocks are mixers only has two blocks for each);
            the published depth of the backbone when None.
        pattern: layer pattern, repeated over the blocks.
        backbone: another backbone.
        tied: whether the head is the transposed embedding; as the backbone when None.
        max_length: longest training sequence in tokens.

    Raises:
        ConfigError: an unknown name, an invalid size, or a pattern longer than the depth.
    """
    family = ARCHITECTURES.get(use).backbone if backbone is None else backbone
    chosen = BACKBONES.get(family)
    depth = chosen.depth(hidden, layers)
    if pattern is not None and len(pattern) > depth:
        raise ConfigError(
            f"a pattern of {len(pattern)} layers does not fit into {depth} blocks; shorten it, or raise model.layers."
        )
    options = {
        "hidden": hidden,
        "vocab": vocab,
        "depth": depth,
        "backbone": family,
        "layers": pattern or (LayerConfig(use=use),),
        "tied": chosen.tied if tied is None else tied,
        "max_length": max_length,
    }
    return configured(ModelConfig, options, "the model")

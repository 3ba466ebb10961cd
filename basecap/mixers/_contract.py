"""The interface of sequence mixers: module, parameter recipe, cost, and the architectures built from mixers.

A file in this package (or a user's plugin file) defines one `Mixer` and registers it with `@mixer(name, ...)`. The rest
of the package needs nothing else to train, evaluate, decode, cost and list it.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from basecap.errors import ConfigError, nearest
from basecap.mixers._cache import Cache
from basecap.mixers._recipes import LayerSpec, ParameterRecipe, default_recipe
from basecap.mixers._unfinished import unfinished
from basecap.names import split_backbone
from basecap.ops import Influence
from basecap.options import configured
from basecap.registry import Registry, source_location


class MixerConfig(BaseModel):
    """Base class of mixer options: frozen, unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class Mixer(nn.Module, ABC):
    """A causal map [B, T, D] -> [B, T, D] along time, with its decoding step, recipe and cost.

    Subclasses set `Config` and `sizes` (published options by model width) and build their parameters in
    `__init__(config, layer)`; `recipe()` defines the initial values.
    """

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    #: Options of the published sizes, by hidden width; other widths use the defaults of Config.
    sizes: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    #: Whether forward, prefill and step take a third argument `shared`, a dict for one pass through the model, in which
    #: the first layer stores values for later layers.
    takes_shared: ClassVar[bool] = False
    #: Whether the mixer works on longer sequences than it was trained on. False if it has parameters for each position.
    takes_longer: ClassVar[bool] = True
    #: Whether `step` takes sequences of different lengths: it reads `cache.start`, the position of each, or does not
    #: depend on the number of tokens so far. Otherwise the sequences of each length step apart. A class with a `step`
    #: of its own does not inherit it.
    takes_lengths: ClassVar[bool] = False
    #: Whether `prefill` also reads further tokens into a cache that is not empty, of sequences of any lengths.
    continues: ClassVar[bool] = False
    #: Small values of the options that set a size, for the conformance suite, so that short sequences have several
    #: heads and cross windows and chunks. Options that Config lacks, and lengths that are None, are ignored.
    tiny: ClassVar[Mapping[str, Any]] = {"heads": 2, "head_dim": 32, "chunk": 16, "window": 16}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in vars(cls) and "takes_lengths" not in vars(cls):
            cls.takes_lengths = False
        if "prefill" in vars(cls) and "continues" not in vars(cls):
            cls.continues = False

    def __init__(self, config: MixerConfig, layer: LayerSpec):
        super().__init__()
        self.config: Any = config  # an instance of the subclass's Config
        self.layer = layer

    @abstractmethod
    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Mix along time, causally.

        Args:
            x_BTD: activations, any floating dtype.
            segments: int64 [B, T], non-decreasing along T; positions with the same id form an independent sequence.
                None if each row is one sequence.
        """

    @abstractmethod
    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return the empty decoding state for `batch` sequences of at most `max_length` tokens."""

    @abstractmethod
    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Mix the next token and update `cache` in place. Returns [B, 1, D], equal to forward at that position."""

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Mix a prompt and fill an empty `cache`; equals forward. The default calls `step` for each token.

        With `continues` it also mixes further tokens, from the state in `cache`.
        """
        return torch.cat([self.step(x_BTD[:, t : t + 1], cache) for t in range(x_BTD.shape[1])], dim=1)

    def influence(self, x_BTD: Tensor) -> Influence | None:
        """Return the factors of the value at s in the mixed value at t for every head, None if there are none."""
        return None

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the values and their mixture (v, y), both [B, T, H, V], with y_t = sum_s influence_ts v_s.

        y is computed as in `forward`, before any gate, norm or output projection; it is used to test `influence`.
        Returns None if `influence` does.
        """
        return None

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """Weights of losses of its own, by name, which training adds to that of the model; none by default.

        `forward` then takes the keyword `losses`, a dict or None, and writes each loss to the dict, a scalar. It gets a
        dict in training only, so that no evaluation has these losses.
        """
        return {}

    @property
    def exact_gradient(self) -> bool:
        """Whether backward is the derivative of forward; False for surrogates such as straight-through."""
        return True

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Return the recipe of every parameter of this module, by its name in `named_parameters`."""
        return default_recipe(self)

    @abstractmethod
    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over one sequence of `length` tokens.

        A multiplication, an addition and an exponential count 1 each, so a multiply-add counts 2. The operations of
        the definition count once, regardless of padding and recomputation in kernels:

        - Products with weights, also of short convolutions, at every token.
        - Products of visible pairs of tokens: half of the square in causal attention.
        - A recurrence token by token: every operation on an element of its state.
        - A long convolution as three real FFTs, see `fourier_flops`.

        Other elementwise work (norms, gates, activations, softmax, rotations, biases) does not count.
        """

    def training_flops(self, length: int) -> float:
        """Floating-point operations of a forward and a backward pass.

        3 * flops unless a part has no gradient or a cheaper one: a product has two gradients of the same cost, and the
        backward pass of a recurrence counts twice the forward pass.
        """
        return 3.0 * self.flops(length)

    @abstractmethod
    def state_bytes(self, length: int) -> int:
        """Bytes of `init_cache(1, length)` in the module's dtype."""


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """One entry of a layer pattern: a mixer class and the options that differ from its defaults."""

    mixer: type[Mixer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def configure(self, hidden: int, overrides: Mapping[str, Any]) -> MixerConfig:
        """Return the options at a width: defaults < published size < variant < overrides; raises ConfigError."""
        chosen = {**self.mixer.sizes.get(hidden, {}), **self.options, **overrides}
        return configured(self.mixer.Config, chosen, f"mixer {self.mixer.__name__}")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named architecture: a layer pattern (repeated to the depth), a backbone, and its source.

    Attributes:
        source: origin of its official values: "OWNER/REPOSITORY@COMMIT: file, file", or whose choice they are.
        differences: one sentence for each deliberate difference from the source, with its reason.
        variant_of: the architecture that it is a variant of, or None.
        canon: places of Canon layers in its blocks, among a, b, c and d.
        ngram: tokens of the n-grams that its model embeds beside each token, 0 for none.
    """

    name: str
    layers: tuple[LayerChoice, ...]
    backbone: str
    summary: str
    paper: str
    source: str = ""
    differences: tuple[str, ...] = ()
    variant_of: str | None = None
    canon: str = ""
    ngram: int = 0

    def __post_init__(self) -> None:
        if split_backbone(self.name)[1] is not None:
            raise ConfigError(f"mixer {self.name!r}: ' in ' is reserved for 'X in BACKBONE'; choose another name.")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A named variant of a mixer: options, Canon layers, n-grams; backbone, paper and so on if those differ."""

    options: Mapping[str, Any] = field(default_factory=dict)
    backbone: str | None = None
    summary: str = ""
    paper: str = ""
    source: str = ""
    differences: tuple[str, ...] = ()
    canon: str = ""
    ngram: int = 0


#: The most tokens of an n-gram: longer ones are hardly met twice.
LONGEST_NGRAM = 256

ARCHITECTURES: Registry[Architecture] = Registry("mixer", "basecap.mixers", "mixers")


def mixer(
    name: str,
    *,
    backbone: str,
    paper: str,
    summary: str,
    options: Mapping[str, Any] | None = None,
    variants: Mapping[str, Variant] | None = None,
    source: str = "",
    differences: tuple[str, ...] = (),
) -> Callable[[type[Mixer]], type[Mixer]]:
    """Register the decorated mixer and its variants as architectures.

    Args:
        name: as people write it, such as "rwkv-7".
        backbone: name of the backbone that it is published with (see `basecap list backbones`).
        paper: the paper that defines it.
        summary: one line for `basecap list mixers`.
        options: options of the plain name that differ from the defaults of Config.
        variants: further names, each with the options (and optionally the backbone) that differ.
        source: origin of its official values: "OWNER/REPOSITORY@COMMIT: file, file", or whose choice they are.
        differences: one sentence for each deliberate difference from the source, with its reason.
    """

    def register(cls: type[Mixer]) -> type[Mixer]:
        where = f"mixer {name!r} ({source_location(cls)})"
        if not (isinstance(cls, type) and issubclass(cls, Mixer)):
            raise ConfigError(f"{where} is not a subclass of basecap.mixers.Mixer; derive it from that class.")
        texts = {"name": name, "backbone": backbone, "paper": paper, "summary": summary, "source": source}
        for key, given in texts.items():
            if not isinstance(given, str):
                raise ConfigError(f"{where}: {key} must be text, not {given!r}.")
        if fault := unfinished(cls):
            raise ConfigError(f"{where} {fault}.")
        if not (isinstance(cls.Config, type) and issubclass(cls.Config, MixerConfig)):
            raise ConfigError(f"{where}: its Config must subclass basecap.mixers.MixerConfig.")
        _refuse_options(cls, where)
        if wrong := next(_ill_typed(options, variants, differences), None):
            raise ConfigError(f"{where}: {wrong}.")
        plain = Variant(options=options or {}, summary=summary, source=source, differences=differences)
        for key, variant in {name: plain, **(variants or {})}.items():
            architecture = Architecture(
                name=key,
                layers=(LayerChoice(mixer=cls, options=variant.options),),
                backbone=variant.backbone or backbone,
                summary=variant.summary or f"{name} with {_words(variant)}",
                paper=variant.paper or paper,
                source=variant.source,
                differences=variant.differences,
                variant_of=None if variant is plain else name,
                canon=variant.canon,
                ngram=variant.ngram,
            )
            ARCHITECTURES.add(key, architecture, cls)
        return cls

    return register


def _refuse_options(cls: type[Mixer], where: str) -> None:
    """Raise ConfigError for an option without a default, or one that `tiny` names and that the mixer does not have."""
    known = cls.Config.model_fields
    if required := [key for key, option in known.items() if option.is_required()]:
        raise ConfigError(f"{where}: option {required[0]!r} has no default; every option in Config needs one.")
    if spare := sorted(cls.tiny.keys() - known.keys() - Mixer.tiny.keys()):
        raise ConfigError(f"{where}: tiny names {spare[0]!r}, which is no option; {nearest(spare[0], known)}")


def _ill_typed(options: object, variants: object, differences: object) -> Iterator[str]:
    """Yield a message for each argument of `@mixer` with a wrong type."""
    if not isinstance(differences, tuple):
        yield f"differences must be a tuple of sentences, such as ('No dropout.',), not {differences!r}"
    if not isinstance(options, Mapping | None):
        yield f"options must be a dict such as {{'heads': 4}}, not {options!r}"
    if not isinstance(variants, Mapping | None):
        yield f"variants must be a dict of names and Variants, not {variants!r}"
        return
    for key, variant in (variants or {}).items():
        if not isinstance(key, str):
            yield f"the name of a variant must be text, not {key!r}"
        elif not isinstance(variant, Variant):
            yield f"variant {key!r} must be a Variant, such as Variant(options={{'heads': 4}}), not {variant!r}"
        elif not isinstance(variant.options, Mapping):
            yield f"the options of variant {key!r} must be a dict such as {{'heads': 4}}, not {variant.options!r}"
        elif not isinstance(variant.differences, tuple):
            yield f"the differences of variant {key!r} must be a tuple of sentences, not {variant.differences!r}"
        elif not isinstance(variant.canon, str) or not re.fullmatch("a?b?c?d?", variant.canon):
            yield f"canon of variant {key!r} must be places among a, b, c and d, such as 'ac', not {variant.canon!r}"
        elif type(variant.ngram) is not int or variant.ngram not in (0, *range(2, LONGEST_NGRAM + 1)):
            yield (
                f"ngram of variant {key!r} must be 2 to {LONGEST_NGRAM} tokens, or 0 for none, not {variant.ngram!r}"
            )


def hybrid(
    name: str,
    *,
    layers: tuple[LayerChoice, ...],
    backbone: str,
    paper: str,
    summary: str,
    source: str = "",
    differences: tuple[str, ...] = (),
) -> Architecture:
    """Register an architecture with a pattern of several mixers; it belongs to the calling module.

    The arguments are those of `mixer`, and the pattern.
    """
    architecture = Architecture(
        name=name,
        layers=layers,
        backbone=backbone,
        summary=summary,
        paper=paper,
        source=source,
        differences=differences,
    )
    ARCHITECTURES.add(name, architecture, layers[0].mixer, sys._getframe(1).f_globals["__name__"])
    return architecture


def divide(whole: int, parts: int, what: str) -> int:
    """Return whole // parts; raises ConfigError unless `parts` is a positive divisor."""
    if parts < 1 or whole % parts:
        raise ConfigError(f"cannot divide {what}: {whole} is not a multiple of {parts}; choose a divisor of {whole}.")
    return whole // parts


def choose_heads(hidden: int, heads: int | None, head_dim: int = 64) -> int:
    """Return `heads`, or as many heads of `head_dim` as fit into `hidden` (at least one, dividing it evenly)."""
    if heads is not None:
        divide(hidden, heads, "channels by heads")
        return heads
    count = max(1, hidden // head_dim)
    while hidden % count:
        count -= 1
    return count


def _words(variant: Variant) -> str:
    own = {**{key: value for key in ("canon", "ngram") if (value := getattr(variant, key))}, **variant.options}
    return ", ".join(f"{key} = {value}" for key, value in own.items()) or "another backbone"

"""Which architectures the tests go through."""

from basecap.mixers import ARCHITECTURES, Architecture

#: basecap's own architectures: `tests/conftest.py` imports this module before a test can register more.
OWN: dict[str, Architecture] = dict(ARCHITECTURES.items())


def distinct_names() -> list[str]:
    """Return the names of all architectures but those that differ from an earlier one in a size alone."""
    found: dict[object, str] = {}
    for name, architecture in OWN.items():
        found.setdefault(_without_sizes(architecture), name)
    return sorted(found.values())


def distinct_models() -> list[str]:
    """Return the names of `distinct_names`, and a model with Canon layers and one with an embedding of n-grams."""
    return [*distinct_names(), "gated-deltanet canon", "transformer++ ngram"]


def _without_sizes(architecture: Architecture) -> object:
    """Return what makes the architecture, without options that are one positive integer instead of another."""
    layers = []
    for choice in architecture.layers:
        defaults = {key: field.default for key, field in choice.mixer.Config.model_fields.items()}
        sizes = {key for key, value in choice.options.items() if type(value) is type(defaults[key]) is int}
        kept = {key: value for key, value in choice.options.items() if key not in sizes or not defaults[key]}
        layers.append((choice.mixer, repr(sorted(kept.items()))))
    return architecture.backbone, tuple(layers)


def one_of_each_kind() -> list[str]:
    """Return a name for each backbone with each set of mixers."""
    found: dict[object, str] = {}
    for name, architecture in OWN.items():
        mixers = {layer.mixer.__name__ for layer in architecture.layers}
        found.setdefault((architecture.backbone, *sorted(mixers)), name)
    return list(found.values())

"""The page of architectures, from the registry: `python -m basecap.models.architecture_page > docs/architectures.md`.

For each architecture where its official values were read, how every parameter starts and trains, and each deliberate
difference with its reason.
"""

import re
import textwrap
from collections.abc import Iterator

from basecap.mixers import ARCHITECTURES, Architecture, ParameterRecipe, Start
from basecap.models.backbones import BACKBONES
from basecap.models.config import model_config
from basecap.models.outline import outline

#: The size whose values the tables show.
HIDDEN, VOCAB = 768, 32_000

HEAD = f"""# Architectures as published

This page shows how each built-in architecture is initialised and trained, and where it differs from its source. It is
generated from the files in `basecap/mixers` and `basecap/models/backbones` by
`python -m basecap.models.architecture_page`.

Every architecture starts and trains as in its authors' code at the given commit, except for the listed differences.
The tests compare each parameter with a table written from that code (`tests/mixers/test_published_*.py`). All
architectures of a study share loss, AdamW and schedule; they differ in the factors on the learning rate and in the
parameters with weight decay.

The tables are for width {HIDDEN} and vocabulary {VOCAB:,}, and show the second block, or the first that has the
parameter. Names without `mixer.` or `feed_forward.` belong to the model and its norms. D is the width, L the number of
blocks, V the vocabulary, i a channel. A variant without its own section starts as the architecture it is listed under.
"""


def page() -> str:
    """Return the page in Markdown."""
    known = [entry for name, entry in ARCHITECTURES.items() if ARCHITECTURES.built_in(name)]
    sections = [section(entry, known) for entry in known if _has_section(entry)]
    return "\n".join([HEAD, *sections])


def section(architecture: Architecture, known: list[Architecture]) -> str:
    """Return the section of one architecture, followed by its variants in `known`."""
    family = BACKBONES.get(architecture.backbone)
    head = "tied to the embedding" if family.tied else "a separate matrix"
    lines = [
        f"## {architecture.name}",
        "",
        _wrapped(
            f"{_sentence(architecture.summary)} Defined in {architecture.paper}. "
            f"Backbone `{architecture.backbone}`: {family.summary}. The head is {head}, unless a study sets `tied`."
        ),
        "",
        _wrapped(f"Source: {_linked(architecture.source)}."),
        "",
        "| parameters | start | learning-rate factor | weight decay |",
        "| --- | --- | --- | --- |",
        *rows(architecture),
        "",
    ]
    plain = ARCHITECTURES.get(architecture.variant_of) if architecture.variant_of else None
    inherited = plain.differences if plain is not None and plain.backbone == architecture.backbone else ()
    if differences := [*inherited, *architecture.differences, *family.differences]:
        lines += ["Differences:", "", *(_wrapped(f"- {text}") for text in differences), ""]
    variants = [entry for entry in known if entry.variant_of == architecture.name and not _has_section(entry)]
    if variants:
        lines += ["Variants:", "", *(_variant(entry) for entry in variants), ""]
    return "\n".join(lines)


def rows(architecture: Architecture) -> list[str]:
    """Return one row per group of parameters with the same recipe."""
    groups: dict[str, list[str]] = {}
    for name, recipe in _parameters(architecture):
        words = recipe.init.words if isinstance(recipe.init, Start) else "by a function of its own"
        groups.setdefault(f"{words} | {recipe.lr:g} | {'yes' if recipe.decay else 'no'}", []).append(name)
    return [f"| {', '.join(names)} | {how} |" for how, names in groups.items()]


def _parameters(architecture: Architecture) -> Iterator[tuple[str, ParameterRecipe]]:
    """Yield each parameter, named without its block's number, and its recipe in the second block, else the first."""
    model = outline(model_config(architecture.name, hidden=HIDDEN, vocab=VOCAB))
    kinds = [type(block.mixer).__name__ for block in model.blocks]
    seen: dict[str, ParameterRecipe] = {}
    for full, recipe in model.recipe().items():
        block = re.match(r"blocks\.(\d+)\.", full)
        own = f"`{full[block.end() :] if block else full}`"
        if block and own.startswith("`mixer.") and len(set(kinds)) > 1:
            own = f"{own} of {kinds[int(block[1])]}"
        if own not in seen or (block and block[1] == "1"):
            seen[own] = recipe
    yield from seen.items()


def _has_section(architecture: Architecture) -> bool:
    """Whether an architecture has its own section: it is not a variant, or has its own source."""
    return architecture.variant_of is None or bool(architecture.source)


def _variant(architecture: Architecture) -> str:
    options = [f"`{key}: {value}`" for choice in architecture.layers for key, value in choice.options.items()]
    given = f" ({', '.join(options)})" if options else ""
    return _wrapped(" ".join([f"- `{architecture.name}`: {architecture.summary}{given}.", *architecture.differences]))


def _wrapped(text: str) -> str:
    """Return a paragraph or an item of a list in lines of at most 120 characters, except for links."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _linked(source: str) -> str:
    """Return a source with a link to its repository at its commit, if it names them."""
    pattern = r"^([\w.-]+/[\w.-]+)@([0-9a-f]{40}): "
    return re.sub(pattern, r"[\1 at \2](https://github.com/\1/tree/\2): ", source) or "none named"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    print(page(), end="")

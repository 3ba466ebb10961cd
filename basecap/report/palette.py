"""Colours and marks that people with any colour vision can tell apart: never colour alone."""

from collections.abc import Sequence

import altair as alt

BLACK, DARK_GREY, GREY, BLUE = "#1b1b1b", "#595959", "#8a8a8a", "#0072b2"
#: Okabe and Ito without yellow, which is too light on white, then dark colours of Paul Tol's muted scheme.
COLOURS = (
    BLUE, "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#117733", "#332288", "#999933",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")


def architecture_scales(names: Sequence[str], reference: str) -> tuple[alt.Scale, alt.Scale]:
    """Return scales of colour and shape: the reference is a black circle; shapes differ where colours come again."""
    others = [name for name in names if name != reference]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(others)} | {reference: BLACK}
    shapes = {name: SHAPES[(index + 1) % len(SHAPES)] for index, name in enumerate(others)} | {reference: SHAPES[0]}
    return (
        alt.Scale(domain=list(names), range=[colours[name] for name in names]),
        alt.Scale(domain=list(names), range=[shapes[name] for name in names]),
    )


def dash_scale(names: Sequence[str], reference: str) -> alt.Scale:
    """Return the scale of lines without marks: dashed where a colour comes again."""
    others = [name for name in names if name != reference]
    again = set(others[len(COLOURS) :])
    return alt.Scale(domain=list(names), range=[[6, 3] if name in again else [1, 0] for name in names])


def domain_scales(domains: Sequence[str]) -> tuple[alt.Scale, alt.Scale]:
    """Return scales of colour and shape for domains, the first of which stands for all."""
    return architecture_scales(domains, domains[0])

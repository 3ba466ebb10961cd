"""The figure of a paper that a study reproduces, in that paper's form, and the published numbers in the same form."""

from collections.abc import Callable

from basecap.report.figures.look import Chart, Study
from basecap.report.figures.paper_entropy import entropy
from basecap.report.figures.paper_losses import losses
from basecap.report.figures.paper_scores import scores

#: Kind of figure, as a study file names it -> what draws it: ours, and what is published.
KINDS: dict[str, Callable[[Study], tuple[Chart | None, Chart | None]]] = {
    "losses": losses,
    "entropy": entropy,
    "scores": scores,
}


def paper(study: Study) -> dict[str, Chart | None]:
    """Return the charts of the study's `figure` by name; nothing where it has none."""
    figure = study["settings"].get("figure")
    if not figure:
        return {}
    ours, published = KINDS[figure["kind"]](study)
    return {study["name"]: ours, f"{study['name']}-published": published}

"""The figure of a paper that a study reproduces, in that paper's form, and the published numbers in the same form."""

from collections.abc import Callable

from basecap.analysis.results import TextResults
from basecap.analysis.study_files import Figure
from basecap.report.figures.paper_entropy import entropy
from basecap.report.figures.paper_losses import losses
from basecap.report.figures.spec import Spec
from basecap.report.published import published_figure

#: Kind of figure, as a study file names it -> the function that draws it: ours, and the published one.
KINDS: dict[str, Callable[[TextResults, Figure], tuple[Spec | None, Spec | None]]] = {
    "losses": losses,
    "entropy": entropy,
}


def paper(study: TextResults) -> dict[str, Spec | None]:
    """Return the charts of the study's `figure` by name; nothing without a figure, or for a table."""
    figure = published_figure(study)
    if figure is None or figure.kind not in KINDS:
        return {}
    ours, published = KINDS[figure.kind](study, figure)
    return {study.name: ours, f"{study.name}-published": published}

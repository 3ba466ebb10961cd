"""The figures of a study: each is one Vega-Lite chart, interactive in the page and static as SVG."""

from basecap.report.figures.evaluations import evaluation
from basecap.report.figures.gaps import along, forest
from basecap.report.figures.look import Chart, styled
from basecap.report.figures.losses import scatter, training
from basecap.report.figures.paper import paper

__all__ = ["Chart", "along", "evaluation", "forest", "paper", "scatter", "styled", "training"]

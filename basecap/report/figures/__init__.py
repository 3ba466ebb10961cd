"""The figures of a study: each is one Vega-Lite chart, interactive in the page and static as SVG."""

from basecap.report.figures.capacity import capacity
from basecap.report.figures.cells import axes_of, cells
from basecap.report.figures.costs import compared, gap_against, looks_of, pareto_front
from basecap.report.figures.evaluations import evaluation
from basecap.report.figures.gaps import forest, gap_curve
from basecap.report.figures.hardest_cells import hardest_cells
from basecap.report.figures.heat_map import further_axis, heat_map
from basecap.report.figures.influence import influence
from basecap.report.figures.layers import has_layers, layers
from basecap.report.figures.learning import learning
from basecap.report.figures.losses import Abscissa, scatter, training
from basecap.report.figures.matrix import matrix
from basecap.report.figures.paper import paper
from basecap.report.figures.parts import parts
from basecap.report.figures.regions import regions
from basecap.report.figures.spec import VEGA_LITE, Spec

__all__ = [
    "VEGA_LITE",
    "Abscissa",
    "Spec",
    "axes_of",
    "capacity",
    "cells",
    "compared",
    "evaluation",
    "forest",
    "further_axis",
    "gap_against",
    "gap_curve",
    "hardest_cells",
    "has_layers",
    "heat_map",
    "influence",
    "layers",
    "learning",
    "looks_of",
    "matrix",
    "paper",
    "pareto_front",
    "parts",
    "regions",
    "scatter",
    "training",
]

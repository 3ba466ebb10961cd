"""The case of Top-1 element selection."""

from torch import Tensor

from basecap.ops._selection.draws import choices
from basecap.ops.cases import by_backend
from basecap.ops.top1_element import FAMILIES, reference, top1_element

FUNCTIONS = ("choose", "gather", "scatter")


def _definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.top1_element(q, k, v, q.shape[3] ** -0.5)


CASES = {"top1-element": by_backend(top1_element, _definition, choices, FAMILIES)}

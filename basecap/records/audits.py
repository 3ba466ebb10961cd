"""How a layer reads the past: what an audit finds, and the names of its numbers in the evaluation `audit`.

Each layer has a `Record` for each of METRICS, and one for the same of its untrained form, see `untrained`.
"""

from dataclasses import dataclass
from typing import Literal

#: The registered name of the evaluation.
EVALUATION = "audit"
#: The numbers of a layer; `relation` may be missing.
METRICS = ("visibility", "relation", "selection", "null")
#: Above HIGH a number is called high in words, below LOW low; from WHOLE on the whole past is seen.
HIGH, LOW, WHOLE = 0.7, 0.3, 0.95


def untrained(metric: str) -> str:
    """Return the metric of a layer's form, with generic parameters.

    >>> untrained("selection")
    'untrained_selection'
    """
    return f"untrained_{metric}"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """How one layer reads the past; each number is from 0 to 1.

    Attributes:
        layer: what was measured, such as "attention" or "layer 3, attention".
        weights: what the weight of a position is: its "influence", or the norm of a "jacobian".
        visibility: the distance of the furthest position that the last one reads, as a share of the largest distance.
        relation: how far the weight of a position moves when its content is drawn anew: largest minus smallest, as a
            share of the largest size. None if no weight could be compared.
        selection: the share of its weight that the last position puts on one random earlier one, in its best head, if
            its input is searched for that.
        null: the share that the same inputs put on the positions that were searched for by others.
        trained: whether the layer was trained: it shows what it has learned to do, not what its form allows.
    """

    layer: str
    weights: Literal["influence", "jacobian"]
    visibility: float
    relation: float | None
    selection: float
    null: float
    trained: bool = False

    @property
    def sentence(self) -> str:
        """What the numbers say."""
        chosen = self.selection - self.null
        if chosen >= HIGH:
            selected = "can select any one position"
        elif self.trained:
            selected = f"as trained {'hardly' if chosen < LOW else 'only partly'} selects one position"
        else:
            selected = f"{'cannot' if chosen < LOW else 'can only partly'} select any one position"
        return f"It {seen_words(self.visibility)}, {related_words(self.relation)} and {selected}."


def seen_words(visibility: float) -> str:
    """Return how far back is read, as "sees the whole past"."""
    return "sees the whole past" if visibility >= WHOLE else f"sees {100 * visibility:.0f} % of the past"


def related_words(relation: float | None) -> str:
    """Return by what positions are weighed, as "weighs positions by their content"."""
    if relation is None:
        return "gives no weight to compare"
    if relation >= HIGH:
        return "weighs positions by their content"
    return f"{'hardly' if relation < LOW else 'partly'} weighs positions by their content"

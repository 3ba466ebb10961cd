"""What the audits of a study's models say of each architecture: how it reads the past, untrained and trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from basecap.analysis.correlations import Measure
from basecap.analysis.results import TextResults
from basecap.analysis.rows import Estimate
from basecap.records.audits import EVALUATION, METRICS, untrained

#: The numbers of a layer by metric.
Layer = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PastReading:
    """How the layers of a model read the past: each number is that of the layer where it is largest.

    `selection` and `null` are those of the layer where selection exceeds its null most. `relation` is None where no
    layer has one.
    """

    visibility: float
    relation: float | None
    selection: float
    null: float

    @property
    def chosen(self) -> float:
        """How much more weight a searched position gets than one that was not searched for."""
        return self.selection - self.null


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """The readings of an architecture, means over its runs: as trained, and of the untrained form of its layers.

    `selections` are those of the trained runs by seed.
    """

    name: str
    trained: PastReading
    form: PastReading
    selections: dict[int, float]


def audit_rows(study: TextResults) -> list[AuditRow]:
    """Return a row for each architecture that was audited, in the order of the study."""
    layers: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for found in study.evaluations:
        for row in found.rows if found.name == EVALUATION else ():
            if row.value is not None:
                own = layers.setdefault(row.name, {}).setdefault(row.seed, {})
                own.setdefault(row.subset, {})[row.metric] = row.value
    return [_row(name, layers[name]) for name in study.names if name in layers]


def _row(name: str, runs: Mapping[int, Mapping[str, Layer]]) -> AuditRow:
    trained = {seed: _reading([*layers.values()]) for seed, layers in runs.items()}
    forms = [_reading([_form(layer) for layer in layers.values()]) for layers in runs.values()]
    return AuditRow(
        name=name,
        trained=_mean([*trained.values()]),
        form=_mean(forms),
        selections={seed: reading.selection for seed, reading in trained.items()},
    )


def _form(layer: Layer) -> Layer:
    """Return the numbers of the untrained form of a layer under their plain names."""
    return {metric: layer[untrained(metric)] for metric in METRICS if untrained(metric) in layer}


def _reading(layers: Sequence[Layer]) -> PastReading:
    best = max(layers, key=lambda layer: layer["selection"] - layer["null"])
    return PastReading(
        visibility=max(layer["visibility"] for layer in layers),
        relation=max((layer["relation"] for layer in layers if "relation" in layer), default=None),
        selection=best["selection"],
        null=best["null"],
    )


def _mean(found: Sequence[PastReading]) -> PastReading:
    related = [reading.relation for reading in found if reading.relation is not None]
    return PastReading(
        visibility=fmean(reading.visibility for reading in found),
        relation=fmean(related) if related else None,
        selection=fmean(reading.selection for reading in found),
        null=fmean(reading.null for reading in found),
    )


def selection_of(study: TextResults, title: str) -> Measure | None:
    """Return the selection of each audited architecture; None without an audit."""
    rows = audit_rows(study)
    if not rows:
        return None
    return Measure(
        name="selection",
        kind="score",
        unit="share",
        better="neither",
        source=title,
        values={row.name: Estimate(value=row.trained.selection, low=None, high=None) for row in rows},
        by_run={row.name: row.selections for row in rows},
    )

"""Several studies over the same architectures, side by side: gaps, other evaluations, costs, and how they correlate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from pydantic_core import from_json

from basecap.analysis.correlations import Correlation, Measure, correlations
from basecap.analysis.results import EvaluationResults, StudyResults, TaskResults, TextResults
from basecap.analysis.rows import Estimate
from basecap.analysis.text.audits import selection_of
from basecap.errors import ConfigError, DataError
from basecap.names import split_backbone
from basecap.system.files import LARGEST
from basecap.system.foreign import read_file

#: Largest ratio of the training speeds of two runs of an architecture on one machine that had it to themselves.
SAME_SPEED = 1.25
#: Numbers of a cost file: key of a row -> name, unit, whether more or less is better.
COSTS: dict[str, tuple[str, str, Literal["lower", "higher"]]] = {
    "tokens_per_s": ("training", "tokens/s", "higher"),
    "prefill_tokens_per_s": ("reading a prompt", "tokens/s", "higher"),
    "decode_tokens_per_s": ("decoding", "tokens/s", "higher"),
    "state_bytes": ("state", "bytes", "lower"),
}


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What studies say of the same architectures.

    Attributes:
        reference: the architecture that gaps are relative to; None without a gap.
        names: architectures in the order of the studies, as their own charts draw them.
        measures: gaps, scores, then costs.
        correlations: of the gap with every score.
    """

    reference: str | None
    names: list[str]
    measures: list[Measure]
    correlations: list[Correlation]


def join(studies: Sequence[StudyResults], titles: Sequence[str], costs: Sequence[Path] = ()) -> Joined:
    """Join studies, and files that `basecap bench models` or `bench generate` wrote with --json.

    Args:
        studies: at least one.
        titles: what each of them is called.
        costs: the files.

    Raises:
        ConfigError: studies of text with different references, studies without an architecture in common, or a cost
            file without one of theirs.
        DataError: a cost file that cannot be read.
    """
    _refuse_references(studies, titles)
    _refuse_strangers(studies, titles)
    own = [list(_of_study(study, title)) for study, title in zip(studies, titles, strict=True)]
    measures = [measure for found in own for measure in found]
    ordered = [name for study in studies for name in _names(study)]
    names = list(dict.fromkeys([*ordered, *(name for measure in measures for name in measure.values)]))
    measured = _of_files(costs, names)
    filed = {measure.name for measure in measured}
    measured += [measure for measure in _of_runs(studies, titles) if measure.name not in filed]
    order = {"gap": 0, "score": 1, "cost": 2}
    measures = sorted([*measures, *measured], key=lambda measure: order[measure.kind])
    references = [study.reference for study in studies if isinstance(study, TextResults)]  # all the same
    reference = references[0] if any(measure.kind == "gap" for measure in measures) else None
    return Joined(reference=reference, names=names, measures=measures, correlations=list(correlations(measures)))


def _refuse_references(studies: Sequence[StudyResults], titles: Sequence[str]) -> None:
    """Raise ConfigError when studies of text share no reference, also where one has no gap yet: it will."""
    named = zip(studies, titles, strict=True)
    found = [(title, study.reference) for study, title in named if isinstance(study, TextResults)]
    for title, reference in found[1:]:
        first, shared = found[0]
        if reference != shared:
            raise ConfigError(
                f"gaps cannot be joined: {first} compares with {shared!r} and {title} with {reference!r}; "
                "give studies with the same reference, or report each of them alone."
            )


def _refuse_strangers(studies: Sequence[StudyResults], titles: Sequence[str]) -> None:
    """Raise ConfigError when no architecture is in two of several studies."""
    sets = [set(_names(study)) for study in studies]
    if len(sets) > 1 and sum(map(len, sets)) == len(set().union(*sets)):
        raise ConfigError(f"{' and '.join(titles)} have no architecture in common; report each of them alone.")


def _names(study: StudyResults) -> list[str]:
    return study.architectures if isinstance(study, TaskResults) else study.names


def _of_study(study: StudyResults, title: str) -> Iterator[Measure]:
    """Yield the gap or the accuracies of a study, then its other evaluations."""
    if isinstance(study, TextResults):
        yield from filter(None, (gap_of(study, title), selection_of(study, title)))
    else:
        yield from _recall(study, title)
    for found in study.evaluations:
        yield from _scores(study, found, title)


def gap_of(study: TextResults, title: str) -> Measure | None:
    """Return the gap of each architecture, 0 for the reference; None without one out of domain."""
    values: dict[str, Estimate] = {
        row.name: Estimate(value=row.gap.value, low=row.gap.low, high=row.gap.high)
        for row in study.comparisons
        if row.gap is not None
    }
    if not values or not study.ood_domains:
        return None
    values = {study.reference: Estimate(value=0.0, low=None, high=None), **values}
    rows = [row for row in study.comparisons if row.range is not None and row.gaps]
    runs = {row.name: dict(zip(row.seeds, row.gaps, strict=True)) for row in rows}
    if rows:
        widest = max(rows, key=lambda row: row.range[1] - row.range[0] if row.range else 0.0)
        runs[study.reference] = dict(zip(widest.reference_seeds, widest.reference_gaps, strict=True))
    return Measure(
        name="gap", kind="gap", unit="nats per token", better="lower", source=title, values=values, by_run=runs
    )


def _recall(study: TaskResults, title: str) -> Iterator[Measure]:
    for task in study.train:
        own: dict[str, Estimate] = {
            row.architecture: row.own for row in study.trained if row.train == task and row.own is not None
        }
        if own:
            yield Measure(
                name=f"recall on {task}",
                kind="score",
                unit="accuracy",
                better="higher",
                source=title,
                values=own,
            )
    if study.shortcuts:
        values: dict[str, Estimate] = {row.architecture: row.index for row in study.shortcuts}
        yield Measure(
            name="shortcut index",
            kind="score",
            unit="accuracy lost",
            better="lower",
            source=title,
            values=values,
        )


def _scores(study: StudyResults, found: EvaluationResults, title: str) -> Iterator[Measure]:
    """Yield the means over runs and layers of each metric.

    Numbers along another axis are left out, and so are numbers that differ by layer on purpose: a mean of them means
    nothing.
    """
    if set(found.axes) - {"layer"} or all(row.subset.startswith("layer ") for row in found.rows):
        return
    runs = {run.name: run.name for run in study.runs}
    if isinstance(study, TaskResults):
        runs = {point.name: point.architecture for point in study.points}
    rows = [row for row in found.rows if row.value is not None and row.name in runs]
    for metric in dict.fromkeys(row.metric for row in rows):
        (unit, better), values = found.kind_of(metric), dict[str, dict[int, list[float]]]()
        for row in rows:
            if row.metric == metric and row.value is not None:
                values.setdefault(runs[row.name], {}).setdefault(row.seed, []).append(row.value)
        yield Measure(
            name=found.name if metric == found.name else f"{found.name} {metric}",
            kind="score",
            unit=unit,
            better=better,
            source=title,
            values={
                name: Estimate(value=mean(chain(*own.values())), low=None, high=None) for name, own in values.items()
            },
            by_run={name: {seed: mean(given) for seed, given in own.items()} for name, own in values.items()},
        )


def _of_runs(studies: Sequence[StudyResults], titles: Sequence[str]) -> Iterator[Measure]:
    """Yield what the runs of studies of text cost: the training speed on each machine, and the size of the state.

    Where runs of one architecture differ in speed, they shared the machine with other runs, some more than others: such
    speeds do not compare architectures.
    """
    for study, title in zip(studies, titles, strict=True):
        if isinstance(study, TaskResults):
            continue
        runs = [run for run in study.runs if run.tokens_per_s is not None and len(run.machines) == 1]
        for machine, group in groupby(sorted(runs, key=lambda run: run.machines[0]), key=lambda run: run.machines[0]):
            speeds: dict[str, list[float]] = {}
            for run in group:
                speeds.setdefault(run.name, []).append(run.tokens_per_s or 0.0)
            if all(max(own) <= SAME_SPEED * min(own) for own in speeds.values()):
                yield _cost("tokens_per_s", f"runs of {title} on {machine}, which they may share", speeds)
        states = {run.name: [float(run.state_bytes)] for run in study.runs if run.state_bytes is not None}
        if states:
            length = study.settings["data"].get("seq_len")
            yield _cost("state_bytes", f"{title}, a sequence of {length} tokens in float32", states)


def _cost(key: str, source: str, found: Mapping[str, Sequence[float]]) -> Measure:
    """Return a cost with the median over the runs of each architecture."""
    medians = {name: Estimate(value=median(own), low=None, high=None) for name, own in found.items()}
    return _of_cost(key, source, medians)


def _of_cost(key: str, source: str, values: dict[str, Estimate]) -> Measure:
    name, unit, better = COSTS[key]
    return Measure(name=name, kind="cost", unit=unit, better=better, source=source, values=values)


def _of_files(paths: Sequence[Path], known: Sequence[str]) -> list[Measure]:
    """Return what cost files measure of architectures that a study has too; files of one device and load count as one.

    A row counts for the architecture of its name, else for that without its backbone ("top1-chunk-exact in rwkv-7"); of
    several rows of an architecture, with different attention, the best. Raises ConfigError for a file without any.
    """
    values: dict[tuple[str, str], dict[str, Estimate]] = {}
    for path in paths:
        found, used = _read(path), False
        load = found.get("load", found.get("setting", {}))
        shown = [f"{key} {value}" for key, value in load.items() if key in ("prompt", "length", "batch")]
        source = f"{found['environment'].get('device', 'unknown device')}, {', '.join(shown)}"
        for key, row in ((key, row) for key in COSTS for row in found["rows"]):
            called = row["architecture"] if row["architecture"] in known else split_backbone(row["architecture"])[0]
            if called in known and isinstance(row.get(key), int | float):
                own = values.setdefault((key, source), {})
                best = max if COSTS[key][2] == "higher" else min
                number = best(own[called].value, row[key]) if called in own else row[key]
                own[called], used = Estimate(value=number, low=None, high=None), True
        if not used:
            raise ConfigError(
                f"{path} has no cost of an architecture of these studies; measure some with `basecap bench`, for "
                f"example --only {known[0]!r}."
            )
    return [_of_cost(key, source, own) for (key, source), own in values.items()]


def _read(path: Path) -> dict[str, Any]:
    """Return a cost file; raises DataError if the file is not a cost file."""
    wrong = (
        f"{path} is not what `basecap bench models` or `basecap bench generate` writes with --json; give such a file."
    )
    try:
        found = from_json(read_file(path, LARGEST))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a file that `basecap bench` wrote.") from error
    except ValueError as error:
        raise DataError(wrong) from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "architecture" in row for row in rows):
        raise DataError(wrong)
    if not isinstance(found.get("environment"), dict):
        raise DataError(wrong)
    return found

"""Models that were trained elsewhere beside those of a study: numbers without a verdict."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from basecap.analysis.results import EvaluationRow, ImportedRow, TextResults
from basecap.analysis.rows import grouped

#: What the report calls a model that no run of the study trained.
ELSEWHERE = "imported, trained elsewhere"


#: What a cell of these tables holds.
Entry = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class ImportedTable:
    """A table: names of columns, and rows; the first `words` cells of each are words, the others numbers."""

    header: list[str]
    words: int
    rows: list[list[Entry]]


def imported_tables(study: TextResults) -> tuple[ImportedTable, ImportedTable] | None:
    """Return costs and bits per byte, and what other evaluations measured; None where nothing was imported."""
    if not study.imported:
        return None
    domains = [*study.train_domains, *study.ood_domains]
    losses = [_own_losses(name, study, domains) for name in study.names]
    losses += [_imported_losses(found, domains) for found in study.imported]
    header = ["model", "trained", "parameters", "state, bytes", *domains]
    return ImportedTable(header=header, words=2, rows=[row for row in losses if row]), _others(study)


def own_tokenizers(study: TextResults) -> list[str]:
    """Return the imported models whose tokens are not those of the study."""
    return [found.name for found in study.imported if found.origin.get("tokenizer") != "study"]


def _own_losses(name: str, study: TextResults, domains: list[str]) -> list[Entry]:
    """Return the row of an architecture: means over its runs at their last evaluation points; none without runs."""
    runs = [run for run in study.runs if run.name == name]
    last = {point.seed: point for point in study.points if point.name == name}
    if not runs or not last:
        return []
    tokens = max(point.tokens for point in last.values())
    bits = [[point.domains[domain].bits_per_byte for point in last.values()] for domain in domains]
    trained = f"{len(last)} {'run' if len(last) == 1 else 'runs'}, {tokens:,} tokens"
    return [name, trained, runs[0].parameters, runs[0].state_bytes, *map(_mean, bits)]


def _imported_losses(found: ImportedRow, domains: list[str]) -> list[Entry]:
    bits = [found.domains[domain].bits_per_byte if domain in found.domains else None for domain in domains]
    return [found.name, ELSEWHERE, found.parameters, found.state_bytes, *bits]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _others(study: TextResults) -> ImportedTable:
    """Return a row for each number that an imported model has, with a column for each model."""
    wanted = grouped([row for found in study.imported for row in found.evaluations], _key)
    own = grouped([row for found in study.evaluations for row in found.rows], _key)
    names = [name for name in study.names if any(row.name == name for rows in own.values() for row in rows)]
    names += [found.name for found in study.imported]
    rows: list[list[Entry]] = []
    for key, found in wanted.items():
        values = grouped([*own.get(key, []), *found], lambda row: row.name)
        means = [_mean([row.value for row in values.get(name, [])]) for name in names]
        axis = ", ".join(f"{axis} {value:g}" for axis, value in found[0].axis.items())
        rows.append([found[0].eval, " ".join(filter(None, (found[0].subset, axis))), found[0].metric, *means])
    return ImportedTable(header=["evaluation", "on", "metric", *names], words=3, rows=rows)


def _key(row: EvaluationRow) -> tuple[object, ...]:
    return (row.eval, row.subset, row.metric, *sorted(row.axis.items()))

"""Grows a study by seeds until its rows are decided: a group-sequential design.

At each look the study is trained and analysed at the level that the look may spend (`basecap.analysis.sequential`).
While a row is undecided, all architectures get the seeds of the next look: seeds for the undecided rows alone would
choose the intervals of a look by what earlier looks have shown, and their levels would no longer add up. What stops
early without a verdict (a row that is behind, or that no number of seeds would decide) makes no verdict wrong.

`looks.json` gets a look before its analysis. An interrupted command finds there how far it was: it trains what is
missing of the look it was at, and analyses each look at the level of that look alone.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from basecap.analysis import TextResults, analyse
from basecap.analysis.rows import Row, Verdict
from basecap.analysis.sequential import Looks, next_look
from basecap.errors import ConfigError
from basecap.records import RunInfo, StudyRecords
from basecap.study.config import StudyConfig, validate
from basecap.study.merge import held_study, merge_studies

#: Verdicts of rows that more tokens or other records change, and no number of seeds.
YOUNG: tuple[Verdict, ...] = ("early", "maturity unknown")


class Train(Protocol):
    """What trains a study."""

    def __call__(self, study: StudyConfig, *, only: set[str]) -> list[RunInfo]:
        """Train the runs that are not finished, of the architectures `only`; return each run's info."""


def train_until_decided(
    study: StudyConfig,
    records: StudyRecords,
    most: int,
    only: Collection[str],
    train: Train,
    log: Callable[[str], None],
) -> list[RunInfo]:
    """Train and analyse a study with more and more seeds until its rows are decided; return each run's info.

    Args:
        study: what was asked for; the seeds and architectures of the directory count too.
        records: of its directory.
        most: seeds that it may grow to.
        only: the architectures to train, the reference among them.
        train: trains them.
        log: takes a sentence per look.

    Raises:
        ConfigError: the directory holds another study, more than `most` seeds, or looks that were planned for another
            number of seeds; and what `train` raises.
    """
    ratio = len(study.seeds_of(study.reference)) / len(study.seeds)
    study, looks = _begin(study, records, most)
    behind: Collection[str] = looks.behind if looks else ()
    failed: set[str] = set()
    infos: dict[tuple[str, int], RunInfo] = {}
    while True:
        names, seeds = {*only} - {*behind} - failed, len(study.seeds)
        infos |= {(info.name, info.seed): info for info in train(study, only=names)}
        looks = looks.at(seeds) if looks else Looks(most=most, looks=(seeds,))
        records.write_looks(looks.model_dump(mode="json"))
        rows = [row for row in _compare(records) if row.name in only]
        failed |= {name for (name, _), info in infos.items() if info.status == "failed"}
        open_ = [row.name for row in rows if row.name not in failed and _seeds_may_decide(row)]
        goes_on = bool(open_) and seeds < most and study.reference not in failed
        log(_describe_look(rows, open_, f"{seeds} of at most {most} seeds", goes_on))
        if not goes_on:
            return list(infos.values())
        behind = tuple(row.name for row in rows if row.verdict == "behind")
        looks = looks.model_copy(update={"behind": behind})
        records.write_looks(looks.model_dump(mode="json"))
        study = _with_seeds(study, next_look(seeds, most), ratio)


def _begin(study: StudyConfig, records: StudyRecords, most: int) -> tuple[StudyConfig, Looks | None]:
    """Return the study with what its directory holds, and the looks so far."""
    if not records.has_study:
        return study, None
    held = held_study(records)
    whole = merge_studies(held, study, records.path)
    looks = Looks.read(records)
    runs, wanted = (len(one.seeds_of(one.reference)) for one in (held, whole))
    if looks and wanted > runs and len(whole.seeds) == looks.looks[-1]:
        # The same seeds seen again with other data are a look that no level was spent on.
        raise ConfigError(
            f"{records.path} was analysed with {runs} runs of {whole.reference}; more of them at the same seeds would "
            "be another look. Leave reference_seeds as it was."
        )
    if looks and looks.most != most:
        raise ConfigError(
            f"the looks at {records.path} are planned for at most {looks.most} seeds; give --max-seeds {looks.most}, "
            "or another --out."
        )
    if len(whole.seeds) > most:
        raise ConfigError(f"{records.path} has {len(whole.seeds)} seeds, more than --max-seeds {most}; raise that.")
    return whole, looks


def _with_seeds(study: StudyConfig, count: int, ratio: float) -> StudyConfig:
    """Return the study with `count` seeds and `ratio` times as many of the reference, where those are its own."""
    update = {"seeds": _continued(study.seeds, count)}
    if study.reference_seeds:
        update["reference_seeds"] = _continued(study.reference_seeds, round(count * ratio))
    return validate(study.model_dump(mode="json") | update, study.name)


def _continued(seeds: tuple[int, ...], count: int) -> list[int]:
    """Return seeds and the integers after the largest of them, `count` in all if there were fewer."""
    return [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + count - len(seeds))]


def _compare(records: StudyRecords) -> list[Row]:
    """Return the rows of the study's table of verdicts."""
    (found,) = analyse([records.path])
    assert isinstance(found, TextResults)
    return found.comparisons


def _seeds_may_decide(row: Row) -> bool:
    """Whether more runs may decide a row; a verdict on these trained models only does not count as decided."""
    if row.gap is None or row.gap.tolerance is None or row.verdict in YOUNG:
        return False
    return row.conditional or (row.verdict == "undecided" and row.more is not None)


def _describe_look(rows: Sequence[Row], open_: Collection[str], when: str, goes_on: bool) -> str:
    """Return the sentence about a look."""
    behind = [row.name for row in rows if row.verdict == "behind"]
    closed = [row.name for row in rows if row.verdict == "undecided" and row.name not in open_]
    parts = [f"undecided: {', '.join(open_)}"] if open_ else []
    if closed:
        parts.append(f"undecided, and seeds alone will not change that: {', '.join(closed)}")
    if behind:
        parts.append(f"behind, needs more tokens and gets no more seeds: {', '.join(behind)}")
    for verdict in YOUNG:
        if names := [row.name for row in rows if row.verdict == verdict]:
            parts.append(f"{verdict}, which more seeds will not change: {', '.join(names)}")
    if without := [row.name for row in rows if row.verdict == "none"]:
        parts.append(f"without a result: {', '.join(without)}")
    return f"{when}: {'; '.join(parts) or 'every row is decided'}{'; adding seeds' if goes_on else ''}."

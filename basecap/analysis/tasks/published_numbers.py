"""Published numbers of a study of tasks beside those of its runs."""

from collections.abc import Sequence

from basecap.analysis.results import Published, PublishedRow
from basecap.analysis.rows import Interval
from basecap.analysis.study_files import PublishedNumbers, PublishedValue
from basecap.analysis.tasks.recall_rows import AccuracyRow


def with_published(
    published: PublishedNumbers | None, tests: Sequence[AccuracyRow], train: Sequence[str]
) -> Published | None:
    """Return published numbers with ours beside them; None for a study without them.

    Args:
        published: the section of the study file, see `basecap.study.published`; numbers in percent.
        tests: accuracies of the study.
        train: training tasks of the study; a number that names none is of the only one, and on its own pattern.
    """
    if published is None:
        return None
    rows = [_row(entry, tests, train, published.metric) for entry in published.values]
    return Published(source=published.source, metric=published.metric, rows=rows)


def _row(entry: PublishedValue, tests: Sequence[AccuracyRow], train: Sequence[str], metric: str) -> PublishedRow:
    own = entry.train or (train[0] if len(train) == 1 else None)
    place = (entry.architecture, own, entry.test or own)
    axis = {name: value for name, value in (("length", entry.length), ("pairs", entry.pairs)) if value is not None}
    value = None if entry.value is None else entry.value / 100
    ours = None
    for row in tests:
        if (row.architecture, row.train, row.test) == place:
            ours = _ours(row, axis, metric)
    return PublishedRow(
        architecture=entry.architecture,
        train=own,
        test=entry.test or own,
        axis=axis,
        published=value,
        value=ours.value if ours else None,
        difference=ours.value - value if ours and value is not None else None,
        within=ours.low <= value <= ours.high if ours and value is not None else None,
    )


def _ours(row: AccuracyRow, axis: dict[str, float], metric: str) -> Interval | None:
    """Return our interval of a metric, of the cell at `axis` or over all cells where that is empty."""
    found = next((cell for cell in row.cells if cell.axis == axis), None) if axis else row
    if found is None:
        return None
    return found.accuracy if metric == "accuracy" else found.case_accuracy

"""A study of tasks in words: its question, findings and cautions."""

from collections.abc import Sequence
from operator import attrgetter

from basecap.analysis.results import RunRow, TaskResults
from basecap.analysis.rows import Interval, grouped
from basecap.analysis.tasks.recall_rows import AccuracyRow, ShiftRow, TrainedRow
from basecap.names import TEST
from basecap.report.published import published_numbers
from basecap.report.text_summary import checks_text, edge_text, listed, mixed_data_text

#: What rows are grouped by.
ARCHITECTURE = attrgetter("architecture")
#: A caution about runs whose best point lacks tests.
PASSED_OVER = "A better evaluation point does not count, as not every test task was measured there"
#: A caution about intervals of single runs.
SINGLE = (
    "Where there is one run, an interval includes the variation over test examples, not over seeds: "
    "train at least three seeds, with --set 'seeds=[0,1,2]'."
)


def recall_question(study: TaskResults) -> str:
    """Return two sentences: the question of a study, and which tasks answer it."""
    trained, others = listed(study.train), [task for task in study.test if task not in study.train]
    elsewhere = bool(others) or len(study.train) > 1
    count = len(study.architectures)
    of, them = ("1 architecture", "it") if count == 1 else (f"{count} architectures", "them")
    also = ", also on patterns that it was not trained on" if elsewhere else ""
    tested = f"tests {them} on {listed(study.test)}" if elsewhere else f"tests {them} there"
    return (
        "A text holds pairs of a key and a value: when a key is asked for, does a model give its value"
        f"{also}? This study trains {of} on {trained} and {tested}."
    )


def known_tasks(study: TaskResults) -> list[tuple[str, str]]:
    """Return name and summary of each task of a study that is registered under its name."""
    from basecap.tasks import TASKS  # reports of text need none

    known = dict(TASKS.items())
    return [(name, known[name].summary) for name in dict.fromkeys([*study.train, *study.test]) if name in known]


def recall_headline(study: TaskResults) -> str:
    """Return two sentences: who recalls on its own pattern, and who does when the pattern changes."""
    if not study.trained:
        return "Nothing has been measured yet."
    return f"{_own(study)} {_moved(study)}"


def _own(study: TaskResults) -> str:
    recalling: dict[str, list[str]] = {}
    best: dict[str, float | None] = {}
    every: list[str] = []
    for name, rows in grouped(study.trained, ARCHITECTURE).items():
        recalling[name] = [row.train for row in rows if row.recalls]
        best[name] = max((row.own.value for row in rows if row.own), default=None)
        if len(recalling[name]) == len(rows):
            every.append(name)
    values = f"{100 * study.learned:g} % or more of the queried values"
    some = [f"{name} does on {listed(tasks)} only" for name, tasks in recalling.items() if tasks and name not in every]
    none = [f"{name} does not ({percent(best[name])})" for name, tasks in recalling.items() if not tasks]
    if not every and not some:
        shown = listed(f"{name} {percent(value)}" for name, value in best.items())
        best_of = "best accuracies" if len(study.train) > 1 else "accuracy"
        return f"No architecture recalls {values} on the pattern it was trained on ({best_of}: {shown})."
    who, verb = (listed(every), "recall" if len(every) > 1 else "recalls") if every else ("no architecture", "recalls")
    where = "the pattern they were trained on" if len(every) > 1 else "the pattern it was trained on"
    whole = "" if every else " in every case"
    return f"On {where}, {who} {verb} {values}{whole}; {'; '.join([*some, *none])}.".replace("; .", ".")


def _moved(study: TaskResults) -> str:
    if not study.shifts:
        return "This study tests on the trained pattern only."
    holds, loses, undecided = [], [], []
    for name, rows in grouped(study.shifts, ARCHITECTURE).items():
        judged = [row for row in rows if row.verdict != "untrained"]
        verdicts = {row.verdict for row in judged}
        if "loses" in verdicts:
            loses.append(f"{name} loses up to {points(worst(judged).index.value)}")
        elif "undecided" in verdicts:
            undecided.append(name)
        elif judged:
            holds.append(name)
    parts = [
        *([f"{listed(holds)} still {'recall' if len(holds) > 1 else 'recalls'}"] if holds else []),
        *loses,
        *([f"{listed(undecided)} {'are' if len(undecided) > 1 else 'is'} undecided"] if undecided else []),
    ]
    if not parts:
        return "What happens when the pattern changes says little in this case."
    return f"When the pattern changes, {'; '.join(parts)}."


def recall_reasons(study: TaskResults) -> list[str]:
    """Return a sentence for each finding that the headline leaves out."""
    return [*_untrained(study), *_all_cells(study), *_losses(study), *_regions(study), *_published(study)]


def _untrained(study: TaskResults) -> list[str]:
    """Return which runs do not recall on their own pattern; nothing if none does, as the headline says so."""
    if not any(row.recalls for row in study.trained):
        return []
    named = []
    for name, rows in grouped((row for row in study.trained if not row.recalls), ARCHITECTURE).items():
        found = [(row.train, percent(row.own.value if row.own else None)) for row in rows]
        tasks = listed(f"{train} ({value})" for train, value in found)
        named.append(f"{name} ({found[0][1]})" if len(study.train) == 1 else f"{name} on {tasks}")
    return [f"Below {100 * study.learned:g} % on the own pattern: {'; '.join(named)}."] if named else []


def _all_cells(study: TaskResults) -> list[str]:
    """Return what is recalled of the own pattern where cells are tested that were not trained in."""
    own = {(row.architecture, row.train): row for row in study.tests if row.test == row.train}
    parts = []
    for row in study.trained:
        if row.recalls and row.measured == "some":
            found = own[row.architecture, row.train]
            least = min(found.cells, key=lambda cell: cell.accuracy.value)
            lowest = f"lowest {percent(least.accuracy.value)}{cell_text(least.axis)}"
            parts.append(f"{label(study, row)} {percent(found.accuracy.value)} ({lowest})")
    return [f"Own pattern in all cells, also those not trained in: {'; '.join(parts)}."] if parts else []


def _losses(study: TaskResults) -> list[str]:
    tests = {(row.architecture, row.train, row.test): row for row in study.tests}
    sentences = []
    for name, rows in grouped(study.shifts, ARCHITECTURE).items():
        judged = [row for row in rows if row.verdict in ("loses", "undecided")]
        if judged:
            row = worst(judged)
            there = percent(tests[name, row.train, row.test].accuracy.value)
            found = f"{there} there, {points(row.index.value)} ({between(row.index)}) less than on its own pattern"
            if row.verdict == "loses":
                sentences.append(f"{label(study, row)} loses most on {row.test}: {found}.")
            else:
                more = "more runs or test examples (task.held_out) would decide"
                sentences.append(f"{label(study, row)} is undecided on {row.test}: {found}; {more}.")
    return sentences


def _regions(study: TaskResults) -> list[str]:
    """Return which region is read most by the runs that answer most queries from one of them."""
    recalling = [(row.architecture, row.train) for row in study.trained if row.recalls]
    sentences = []
    for test in study.test:
        readers: dict[str, list[str]] = {}
        for row in study.tests:
            if row.test == test and row.regions and (row.architecture, row.train) in recalling:
                shares = [part.value for part in row.regions]
                if sum(shares) < 0.5:
                    continue
                most = max(range(len(shares)), key=shares.__getitem__)
                reader = f"{label(study, row)} ({percent(shares[most])})"
                equal = row.regions[most].low <= sum(shares) / len(shares)  # an equal share lies in the interval
                region = "no region more than the others" if equal else f"region {most + 1} of {len(shares)}"
                readers.setdefault(region, []).append(reader)
        parts = [f"{region} by {listed(names)}" for region, names in sorted(readers.items())]
        sentences += [f"Read most on {test}: {'; '.join(parts)}."] if parts else []
    return sentences


def _published(study: TaskResults) -> list[str]:
    found = published_numbers(study)
    if found is None or not any(row.recalls for row in study.trained):  # published models recall
        return []
    pairs = [(row, row.difference) for row in found.rows if row.difference is not None]
    if not pairs:
        return []
    far, difference = max(pairs, key=lambda pair: abs(pair[1]))
    held = sum(row.within is True for row in found.rows)
    return [
        f"Beside {found.source}: our intervals hold {held} of {len(pairs)} published numbers; the largest difference "
        f"is {points(difference, signed=True)} ({far.architecture} trained on {far.train}, tested on "
        f"{far.test}{cell_text(far.axis)})."
    ]


def recall_cautions(study: TaskResults) -> list[str]:
    """Return cautions: single runs, missing or unfinished runs, published numbers without one of ours."""
    single = any(len(row.seeds) == 1 for row in study.trained)
    running = [run for run in study.runs if run.status == "running"]
    counting = {(row.name, row.seed) for row in study.points}
    named = [f"{run.name} (seed {run.seed}) at {run.tokens:,} tokens" for run in running]
    passed = [f"{row.name} (seed {row.seed})" for row in study.points if row.passed_over]
    numbers = published_numbers(study)
    alone = [row for row in (numbers.rows if numbers else []) if row.value is None]
    unmet = [f"{len(own)} of {name}" for name, own in grouped(alone, ARCHITECTURE).items()]
    return [
        *checks_text(study.failed_checks),
        *([SINGLE] if single and study.scale != TEST else []),
        *([f"Not finished: {', '.join(named)}. {_shown(running, counting)}"] if running else []),
        *([f"{PASSED_OVER}: {listed(passed)}."] if passed else []),
        *([f"Not measured: {listed(study.waiting)}."] if study.waiting and study.trained else []),
        *([f"Published numbers without one of ours: {listed(unmet)}."] if unmet else []),
        *edge_text(study.sweep),
        *mixed_data_text(study),
    ]


def _shown(running: Sequence[RunRow], counting: set[tuple[str, int]]) -> str:
    some = any((run.name, run.seed) in counting for run in running)
    how = "Where no run of a row is finished, it shows how far they are. " if some else ""
    return f"{how}Run the same command again, with its --set and --only, to resume."


def worst(rows: Sequence[ShiftRow]) -> ShiftRow:
    """Return the row with the largest shortcut index."""
    return max(rows, key=lambda row: row.index.value)


def label(study: TaskResults, row: AccuracyRow | ShiftRow | TrainedRow) -> str:
    """Return which runs a row is of: the training task is named where the study has several."""
    return row.architecture if len(study.train) == 1 else f"{row.architecture} on {row.train}"


def cell_text(axis: dict[str, float]) -> str:
    """Return the cell of a number as ", length 64, pairs 4", "" for the mean over cells."""
    return "".join(f", {name} {value:g}" for name, value in axis.items())


def percent(value: float | None) -> str:
    """Return a share as "99.7 %", a dash when there is none.

    >>> percent(0.9972), percent(None)
    ('99.7 %', '–')
    """
    return "–" if value is None else f"{100 * value:.1f} %"


def between(found: Interval | None) -> str:
    """Return the interval of a share in percent as "98.9 … 99.9", a dash when there is none."""
    if found is None:
        return "–"
    return f"{100 * found.low:.1f} … {100 * found.high:.1f}"


def points(value: float | None, signed: bool = False) -> str:
    """Return a difference of shares as "84.3 points", "+84.3 points" with a sign.

    >>> points(0.8428), points(-0.01, signed=True)
    ('84.3 points', '-1.0 points')
    """
    if value is None:
        return "–"
    return f"{100 * value:+.1f} points" if signed else f"{100 * value:.1f} points"

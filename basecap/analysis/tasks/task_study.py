"""Studies of tasks: what each architecture recalls where it was trained, and what is left when the pattern changes.

Source: arXiv 2410.15678. Its tables are means over all cells of a task's grid; what they call accuracy is the share of
queried values that are right.
"""

from collections.abc import Collection, Mapping, Sequence

from basecap.analysis.results import Failure, LearningPoint, TaskPoint, TaskResults
from basecap.analysis.rows import LEVEL, Interval
from basecap.analysis.runs import Run, curve, describe_all, evaluations, failed_checks, read_runs, sweeps
from basecap.analysis.study_files import TaskStudyFile, parse
from basecap.analysis.tasks.published_numbers import with_published
from basecap.analysis.tasks.recall_rows import AccuracyRow, CellRow, ShiftRow, ShortcutRow, TrainedRow, Verdict
from basecap.analysis.tasks.shares import Share, estimate
from basecap.analysis.tasks.task_runs import (
    ACCURACY,
    CASES,
    EVALUATION,
    REGION,
    VALIDATION,
    Cell,
    Key,
    TaskRun,
    by_step,
    select_point,
    validation_accuracy,
)
from basecap.records import StudyRecords

#: Accuracy on its own pattern from which on a model has learnt to recall.
LEARNED = 0.95
#: Accuracy that a model may lose under a shift and still count as recalling there.
TOLERATED = 0.05


def analyse_tasks(records: StudyRecords) -> TaskResults:
    """Analyse a study of tasks; raises DataError for records that cannot be read."""
    settings = records.study()
    study = parse(settings, TaskStudyFile, records.path / "study.yaml")
    train, test = study.task.train, study.task.test or study.task.train
    architectures = [entry.name for entry in study.architectures]
    places = {
        name_of(entry.name, task, train): (entry.name, task)
        for entry in study.architectures
        for task in train
        if entry.tasks is None or task in entry.tasks
    }
    names = list(places)
    runs = read_runs(records, names)
    counted, failures = _task_runs(runs, study.task.checkpoint)
    groups = {place: own for place in places.values() if (own := _group(counted, *place))}
    trained = [_trained(*place, own) for place, own in groups.items()]
    recalling = {(row.architecture, row.train) for row in trained if row.recalls}
    tests = [_test(*place, other, own) for place, own in groups.items() for other in test]
    shifted = {task: [other for other in study.task.shifts.get(task, test) if other in test] for task in train}
    shifts = [
        _shift(*place, other, own, place in recalling) for place, own in groups.items() for other in shifted[place[1]]
    ]
    tested = [row for row in tests if row is not None]
    return TaskResults(
        name=study.name,
        scale=study.scale,
        summary=study.summary,
        names=names,
        architectures=architectures,
        reference=study.reference if study.reference in architectures else architectures[0],
        train=train,
        test=test,
        checkpoint=study.task.checkpoint,
        confidence=1 - LEVEL,
        learned=LEARNED,
        tolerated=TOLERATED,
        trained=trained,
        tests=tested,
        shifts=[row for row in shifts if row is not None],
        shortcuts=_shortcuts(groups, shifted, recalling),
        published=with_published(study.published, tested, train),
        waiting=[name for name in names if name not in {one.name for one in counted}],
        points=[_point(one) for one in counted],
        learning=[point for run in runs for point in _learning(run)],
        curves=[point for run in runs for point in curve(run)],
        runs=describe_all(runs, records),
        evaluations=evaluations(records, runs, without=EVALUATION),
        failures=failures,
        sweep=sweeps(records),
        settings=settings,
        environment=records.environment(),
        failed_checks=failed_checks(records),
    )


def name_of(architecture: str, task: str, train: Sequence[str]) -> str:
    """Return the name of the runs of an architecture on one of the training tasks."""
    return architecture if len(train) == 1 else f"{architecture} on {task}"


def _task_runs(runs: Sequence[Run], checkpoint: str) -> tuple[list[TaskRun], list[Failure]]:
    """Return the runs with a point that counts, and the failures: also finished runs without such a point."""
    counted, failures = [], []
    for run in runs:
        found = select_point(run, checkpoint)
        if run.info.status == "failed":
            failures.append(run.failure(run.info.message))
        elif found is None and run.info.status == "finished":
            what = "validation accuracy on its own task" if checkpoint == "best" else "evaluation point"
            failures.append(run.failure(f"it has no {what}, so it does not count"))
        if found is not None:
            counted.append(found)
    return counted, failures


def _group(counted: Sequence[TaskRun], architecture: str, task: str) -> list[TaskRun]:
    """Return the runs of one architecture on one task: those at their end, or the others where none is."""
    own = [one for one in counted if (one.architecture, one.task) == (architecture, task)]
    return [one for one in own if one.finished] or own


def _cells(runs: Sequence[TaskRun], test: str, metric: str) -> list[Cell]:
    """Return the cells of a task that every one of the runs has a share of, in the order of the records."""
    return [
        key.cell
        for key in runs[0].shares
        if (key.test, key.metric) == (test, metric) and all(Key(run.task, *key[1:]) in run.shares for run in runs)
    ]


def _mean(runs: Sequence[TaskRun], test: str, metric: str, cells: Sequence[Cell] | None = None) -> Interval | None:
    """Return a metric as the mean over `cells`, by default all that have it; None where there is none."""
    cells, train = _cells(runs, test, metric) if cells is None else cells, runs[0].task
    if not cells:
        return None
    return estimate(_units(runs), {Key(train, test, metric, cell): 1 / len(cells) for cell in cells})


def _units(runs: Sequence[TaskRun]) -> list[dict[Key, Share]]:
    return [run.shares for run in runs]


def _own(runs: Sequence[TaskRun]) -> tuple[str, list[Cell]]:
    """Return the metric and the cells in which runs show what they learnt: tested ones among those trained in.

    Where none of them is tested, the metric is accuracy on validation examples.
    """
    train = runs[0].task
    tested, validated = _cells(runs, train, ACCURACY), _cells(runs, train, VALIDATION)
    both = [cell for cell in tested if cell in validated] if validated else tested
    return (ACCURACY, both) if both else (VALIDATION, validated)


def _trained(architecture: str, train: str, runs: Sequence[TaskRun]) -> TrainedRow:
    metric, cells = _own(runs)
    own = _mean(runs, train, metric, cells)
    whole = len(cells) == len(_cells(runs, train, ACCURACY))
    return TrainedRow(
        architecture=architecture,
        train=train,
        seeds=_seeds(runs),
        own=own,
        measured="validation" if metric == VALIDATION else "all" if whole else "some",
        recalls=own is not None and own.value >= LEARNED,
    )


def _test(architecture: str, train: str, test: str, runs: Sequence[TaskRun]) -> AccuracyRow | None:
    accuracy = _mean(runs, test, ACCURACY)
    if accuracy is None:
        return None
    regions: list[Interval] = []
    while (share := _mean(runs, test, f"{REGION}{len(regions) + 1}")) is not None:
        regions.append(share)
    units, whole = _units(runs), set(_cells(runs, test, CASES))
    cells = []
    for cell in _cells(runs, test, ACCURACY):
        values, cases = Key(train, test, ACCURACY, cell), Key(train, test, CASES, cell)
        cells.append(
            CellRow(
                axis=dict(cell),
                accuracy=estimate(units, {values: 1.0}),
                case_accuracy=estimate(units, {cases: 1.0}) if cell in whole else None,
                examples=units[0][values].examples,
            )
        )
    return AccuracyRow(
        architecture=architecture,
        train=train,
        test=test,
        seeds=_seeds(runs),
        accuracy=accuracy,
        case_accuracy=_mean(runs, test, CASES),
        regions=tuple(regions),
        cells=tuple(cells),
    )


def _difference(runs: Sequence[TaskRun], test: str) -> dict[Key, float]:
    """Return the weights of accuracy on the own task minus that on another, over the cells that both have."""
    train = runs[0].task
    metric, own = _own(runs)
    common = [cell for cell in _cells(runs, test, ACCURACY) if cell in own] if test != train else []
    weights = {Key(train, train, metric, cell): 1 / len(common) for cell in common}
    return weights | {Key(train, test, ACCURACY, cell): -1 / len(common) for cell in common}


def _shift(architecture: str, train: str, test: str, runs: Sequence[TaskRun], recalls: bool) -> ShiftRow | None:
    weights = _difference(runs, test)
    if not weights:
        return None
    index = estimate(_units(runs), weights)
    return ShiftRow(
        architecture=architecture,
        train=train,
        test=test,
        seeds=_seeds(runs),
        cells=len(weights) // 2,
        index=index,
        verdict=_verdict(index) if recalls else "untrained",
    )


def _verdict(index: Interval) -> Verdict:
    if index.high <= TOLERATED:
        return "holds"
    return "loses" if index.low > TOLERATED else "undecided"


def _shortcuts(
    groups: Mapping[tuple[str, str], Sequence[TaskRun]],
    shifted: Mapping[str, Sequence[str]],
    recalling: Collection[tuple[str, str]],
) -> list[ShortcutRow]:
    """Return a row per architecture with shifts; a seed counts that has a run on each training task of its row.

    `shifted` has the test tasks to compare with by training task.
    """
    found = []
    for name in dict.fromkeys(architecture for architecture, _ in groups):
        own = {task: runs for (architecture, task), runs in groups.items() if architecture == name}
        learnt = {task: runs for task, runs in own.items() if (name, task) in recalling}
        every = ((runs, _difference(runs, other)) for task, runs in (learnt or own).items() for other in shifted[task])
        differences = [(runs, weights) for runs, weights in every if weights]
        if not differences:
            continue
        total: dict[Key, float] = {}
        seeds = set.intersection(*({run.seed for run in runs} for runs, _ in differences))
        for _, weights in differences:
            for key, weight in weights.items():
                total[key] = total.get(key, 0.0) + weight / len(differences)
        units = [
            {
                key: share
                for runs, _ in differences
                for run in runs
                if run.seed == seed
                for key, share in run.shares.items()
            }
            for seed in sorted(seeds)
        ]
        if units:
            index = estimate(units, total)
            found.append(
                ShortcutRow(
                    architecture=name,
                    seeds=sorted(seeds),
                    shifts=len(differences),
                    index=index,
                    recalls=bool(learnt),
                )
            )
    return found


def _seeds(runs: Sequence[TaskRun]) -> list[int]:
    return [run.seed for run in runs]


def _point(one: TaskRun) -> TaskPoint:
    return TaskPoint(
        name=one.name,
        seed=one.seed,
        architecture=one.architecture,
        train=one.task,
        step=one.step,
        tokens=one.tokens,
        validation=one.validation,
        passed_over=one.passed_over,
    )


def _learning(run: Run) -> list[LearningPoint]:
    """Return accuracy on validation examples of the own task at every evaluation point, mean over cells."""
    found = []
    for step, records in by_step(run.evals).items():
        accuracy = validation_accuracy(records)
        if accuracy is not None:
            name, seed, tokens = run.info.name, run.info.seed, records[0].tokens
            found.append(LearningPoint(name=name, seed=seed, step=step, tokens=tokens, accuracy=accuracy))
    return found

"""A study of tasks on disk with made-up answers, as a real one would leave it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from basecap.records import RunInfo, StudyRecords
from basecap.records.measured import Declaration, Record

TASKS = ("mqar", "mqar-last", "mqar-shuffle")
#: Length -> numbers of pairs.
GRID = {64: (1, 4, 16), 128: (1, 4, 16, 32), 256: (1, 4, 16, 32, 64)}
CELLS = tuple({"length": float(length), "pairs": float(pairs)} for length, several in GRID.items() for pairs in several)
#: Examples of a cell.
EXAMPLES = 100

#: (architecture, training task, test task, cell, seed) -> share of right values.
Answer = Callable[[str, str, str, dict[str, float], int], float]


def write_task_study(
    path: Path,
    answer: Answer,
    *,
    architectures: Sequence[str] = ("steady", "leaning"),
    train: Sequence[str] = TASKS,
    test: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    cells: Sequence[dict[str, float]] = CELLS,
    growth: Sequence[float] = (0.5, 1.0),
    regions: dict[str, Sequence[float]] | None = None,
    **changes: Any,
) -> StudyRecords:
    """Write records of runs that answer what `answer` says at their end.

    Args:
        path: the directory.
        answer: what is right.
        architectures, train, test, seeds, cells: of the study.
        growth: factor of every share at each evaluation point.
        regions: shares of regions by test task.
        changes: of the study file.
    """
    records = StudyRecords(path)
    study = {
        "name": "moved-patterns",
        "summary": "made-up answers",
        "task": {"train": list(train), "test": list(test or train), "options": {}, "checkpoint": "best"},
        "model": {"hidden": 64, "layers": 2},
        "train": {"epochs": 2},
        "architectures": [{"name": name, "use": name} for name in architectures],
        "seeds": list(seeds),
        "evals": ["recall"],
    }
    records.create(study | changes)
    records.write_environment({"basecap": "0.1.0", "device": "CPU"})
    records.write_declarations([Declaration(name="recall", unit="share", better="higher")])
    for architecture in architectures:
        for task in train:
            name = architecture if len(train) == 1 else f"{architecture} on {task}"
            for seed in seeds:
                run = records.run(name, seed)
                run.write_info(
                    RunInfo(
                        name=name,
                        architecture=architecture,
                        task=task,
                        seed=seed,
                        use=architecture,
                        status="finished",
                        message="",
                        parameters=123_456,
                        state_bytes=4096,
                        device="CPU",
                        precision="fp32",
                    )
                )
                for number, factor in enumerate(growth, start=1):
                    step = 50 * number
                    loss = 3.0 - number
                    rest = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 9e4, "seconds": 30.0}
                    run.append_metrics({"step": step, "tokens": step * 4096, "train_loss": loss, **rest})
                    found = []
                    for other in test or train:
                        for cell in cells:
                            value = factor * answer(architecture, task, other, cell, seed)
                            found += answers(step, other, cell, value, (regions or {}).get(other, ()))
                    for cell in cells:
                        value = factor * answer(architecture, task, task, cell, seed)
                        found += answers(step, task, cell, value, prefix="validation_")
                    run.append_evals(found)
    return records


def answers(
    step: int,
    task: str,
    cell: dict[str, float],
    value: float,
    regions: Sequence[float] = (),
    *,
    prefix: str = "",
    examples: int = EXAMPLES,
) -> list[Record]:
    """Return the records of one cell at one evaluation point; a case is right with the square of `value`."""
    common = {"step": step, "tokens": step * 4096, "eval": "recall", "subset": task, "axis": dict(cell)}
    values = examples * int(cell.get("pairs", 1))
    return [
        Record(**common, metric=f"{prefix}accuracy", value=value, n=values),
        Record(**common, metric=f"{prefix}case_accuracy", value=value**2, n=examples),
        *(
            Record(**common, metric=f"region_{number}", value=share, n=values)
            for number, share in enumerate(regions, start=1)
        ),
    ]

"""Examples of a task as text for the terminal: options, grid, and tokens with their roles."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from basecap.errors import ConfigError
from basecap.plugins import faults
from basecap.system.yaml_text import parse_yaml
from basecap.tasks._contract import Task, asked, build_task
from basecap.tasks._instances import NOTHING, Instances, Role

_LETTERS = {
    Role.FILLER: ("·", "dim"),
    Role.KEY: ("k", "blue"),
    Role.VALUE: ("v", "green"),
    Role.QUERY: ("q", "bold magenta"),
    Role.SEPARATOR: ("s", "cyan"),
    Role.MASK: ("m", "yellow"),
    Role.NOISE: ("n", "red"),
}
_ANSWER, _UNSCORED = "bold green", "dim"
#: Maximum number of tokens of an example to show.
_SHOWN = 512
#: Examples behind the share of queries with one answer, and their tokens at most.
_SOLVED, _SOLVED_TOKENS = 200, 2**16


def inspect_task(name: str, settings: Sequence[str], count: int, width: int | None) -> Text:
    """Return the output of `basecap data inspect` for a task: its options, its grid and its first examples.

    Args:
        name: see `build_task`.
        settings: options as "key=value", the value in YAML.
        count: number of examples.
        width: columns to wrap tokens at; None returns the examples only, as JSON.

    Raises:
        ConfigError: the name or an option is unknown, a value is invalid, or the code of the task fails.
    """
    task = _configured(name, settings)
    with faults(f"task {name!r} cannot be shown"):
        if width is None:
            return Text(json.dumps(_rows(task, count)))
        return Text("\n").join(_lines(name, task, count, width))


def _configured(name: str, settings: Sequence[str]) -> Task:
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting!r} does not have the form option=value; write for example pairs=8.")
        try:
            options[key] = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {setting!r}: the value {error}.") from error
    return build_task(name, options)


def _rows(task: Task, count: int) -> list[dict[str, Any]]:
    """Return the first examples as JSON values, with the answers of the solver."""
    found = task.instances(0, range(count))
    rows = []
    for row in range(count):
        answers = task.solve(found.inputs[row], asked(found, row))
        rows.append(
            {
                "example": row,
                "inputs": found.inputs[row].tolist(),
                "targets": found.targets[row].tolist(),
                "roles": [Role(role).name.lower() for role in found.roles[row]],
                "pairs": found.pairs[row].tolist(),
                "groups": found.groups[row].tolist(),
                "answers": {place: sorted(right) for place, right in answers.items()},
            }
        )
    return rows


def _lines(name: str, task: Task, count: int, width: int) -> list[Text]:
    found = task.instances(0, range(count))
    options = ", ".join(f"{key} {value}" for key, value in task.config.model_dump().items())
    lines = [
        Text(f"{name}: {task.vocabulary:,} token ids; {options}"),
        *_grid(task),
        *_ambiguous(task),
        _legend(found),
        Text(),
    ]
    for row in range(count):
        lines += [Text(f"example {row}", style="bold"), *_example(found, row, width), *_choices(found, row), Text()]
    return lines


def _grid(task: Task) -> list[Text]:
    """Return the published cells; cells that differ only in the last axis share a line."""
    *axes, last = task.axes
    rows: dict[tuple[int | float, ...], list[int | float]] = {}
    for cell in task.grid():
        rows.setdefault(tuple(cell[axis] for axis in axes), []).append(cell[last])
    lines = [Text(f"grid, {len(task.grid())} cells:")]
    for place, values in rows.items():
        named = ", ".join(f"{axis} {value}" for axis, value in zip(axes, place, strict=True))
        lines.append(Text(f"  {named}{': ' if named else ''}{last} {', '.join(map(str, values))}"))
    return lines


def _ambiguous(task: Task) -> list[Text]:
    """Return a line if the context does not determine all answers, as in the paper mode of some tasks."""
    found = task.instances(0, range(max(1, min(_SOLVED, _SOLVED_TOKENS // task.length))))
    if found.choices is not None:  # several answers are right
        return []
    best: dict[tuple[int, int], float] = {}  # the chance of every queried value, guessed among the answers that fit
    for row in range(len(found)):
        for place, answers in task.solve(found.inputs[row], asked(found, row)).items():
            right = int(found.targets[row, place]) in answers
            query = (row, int(found.groups[row, place]))
            best[query] = min(best.get(query, 1.0), 1 / len(answers) if right else 0.0)
    chances = np.array(list(best.values()))
    if (chances == 1).all():
        return []
    return [
        Text(
            f"not determined by the context: {100 * np.mean(chances < 1):.1f} % of the queried values of "
            f"{len(found)} examples; a model that recalls everything gets {100 * np.mean(chances):.1f} % of all right"
        )
    ]


def _legend(found: Instances) -> Text:
    legend = Text("roles: ")
    for role in Role:
        if (found.roles == role).any():
            letter, style = _LETTERS[role]
            legend.append(f"{letter} {role.name.lower()}", style=style).append("  ")
    legend.append("(with the number of the pair); target: the token to predict at a position")
    if ((found.targets != NOTHING) & (found.groups == NOTHING)).any():
        legend.append(", in brackets if it is trained but not scored")
    return legend


def _example(found: Instances, row: int, width: int) -> list[Text]:
    """Return tokens, roles and targets below each other, wrapped to `width`."""
    length = found.inputs.shape[1]
    shown = min(length, _SHOWN)
    cells = [_cell(found, row, place) for place in range(shown)]
    column = 1 + max(len(text) for cell in cells for text, _ in cell)
    per_line = max(1, (width - 7) // column)
    lines = []
    for start in range(0, shown, per_line):
        part = cells[start : start + per_line]
        for number, title in enumerate(("tokens", "roles", "target")):
            if title == "target" and not any(cell[2][0] for cell in part):
                continue
            line = Text(f"{title:<6}")
            for cell in part:
                text, style = cell[number]
                line.append(" " * (column - len(text))).append(text, style=style)
            lines.append(line)
    if shown < length:
        lines.append(Text(f"... {length - shown:,} more tokens"))
    return lines


def _choices(found: Instances, row: int) -> list[Text]:
    """Return the right tokens of every group by region."""
    choices = [] if found.choices is None else found.choices[row].tolist()
    return [
        Text(f"right for {group}: ").append(", ".join(f"{token} (region {at})" for at, token in enumerate(tokens, 1)))
        for group, tokens in enumerate(choices)
    ]


def _cell(found: Instances, row: int, place: int) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    letter, style = _LETTERS[Role(found.roles[row, place])]
    pair, target, group = (int(array[row, place]) for array in (found.pairs, found.targets, found.groups))
    role = letter if pair == NOTHING else f"{letter}{pair}"
    answer = "" if target == NOTHING else str(target) if group != NOTHING else f"({target})"
    answer_style = _ANSWER if group != NOTHING else _UNSCORED
    return (str(found.inputs[row, place]), style), (role, style), (answer, answer_style)

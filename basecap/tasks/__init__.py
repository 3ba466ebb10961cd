"""Synthetic tasks, one file per family. docs/tasks.md describes how to use and add them."""

from basecap.tasks._contract import (
    TASKS,
    Answers,
    Cell,
    Facts,
    NamedTask,
    Readout,
    Task,
    TaskConfig,
    asked,
    build_task,
    task,
)
from basecap.tasks._draws import ExampleDraws, Ints, key_of
from basecap.tasks._examples import inspect_task
from basecap.tasks._instances import NOTHING, Canvas, Instances, Role

__all__ = [
    "NOTHING",
    "TASKS",
    "Answers",
    "Canvas",
    "Cell",
    "ExampleDraws",
    "Facts",
    "Instances",
    "Ints",
    "NamedTask",
    "Readout",
    "Role",
    "Task",
    "TaskConfig",
    "asked",
    "build_task",
    "inspect_task",
    "key_of",
    "task",
]

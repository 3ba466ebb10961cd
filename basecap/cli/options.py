"""Options shared by several commands."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from basecap.cli.output import writable_file
from basecap.errors import ConfigError
from basecap.names import check_checked_device_name, check_device_name

if TYPE_CHECKING:
    from basecap.study.config import StudyConfig

#: Largest accepted size: larger tensors exceed any machine's memory, and the largest overflow an integer.
LARGEST = 2**20
#: Most jobs at a time on one device.
MOST_JOBS = 64


def _runs_per_device(text: str) -> int | Literal["auto"]:
    """Return the value of --per-device; raises BadParameter."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not 1 <= int(text) <= MOST_JOBS:
        raise typer.BadParameter(f"{text!r} is not auto or a number from 1 to {MOST_JOBS}.")
    return int(text)


StudyArgument = Annotated[str, typer.Argument(help="a built-in study (`basecap list studies`) or a YAML file")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", help="override a setting of the study (`basecap list settings`), e.g. train.lr=3e-4; repeatable"
    ),
]
Scale = Annotated[
    str | None,
    typer.Option("--scale", help="size of the study: paper, or one of its `scales`, e.g. test, laptop or gpu"),
]
Plugins = Annotated[
    list[Path],
    typer.Option("--plugin", help="Python file with mixers, evaluations, tasks or sources of your own; repeatable"),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="directory of the study (default: runs/NAME, or runs/NAME-SCALE)")
]
Device = Annotated[
    str | None,
    typer.Option("--device", callback=check_device_name, help="cpu, cuda or cuda:N (default: a GPU if there is one)"),
]
CheckedDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        callback=check_checked_device_name,
        help="cpu, cuda, cuda:N, or mps for an Apple GPU (default: a CUDA GPU if there is one)",
    ),
]
PerDevice = Annotated[
    int,
    typer.Option(
        "--per-device",
        "--per-gpu",
        min=1,
        max=MOST_JOBS,
        help="jobs at a time on each GPU or on the CPU; for small models",
    ),
]
RunsPerDevice = Annotated[
    Any,  # Typer takes no union
    typer.Option(
        "--per-device",
        "--per-gpu",
        parser=_runs_per_device,
        metavar="N|auto",
        help="runs at a time on each GPU or on the CPU; auto: as many as a trial step leaves room for on a GPU",
    ),
]
AllowUnproved = Annotated[
    bool, typer.Option("--allow-unproved", help="train and judge mixers that are not proved to see no future")
]
UntilDecided = Annotated[
    bool, typer.Option("--until-decided", help="add seeds until every row of the table has a verdict")
]
MaxSeeds = Annotated[int | None, typer.Option("--max-seeds", help="largest number of seeds for --until-decided")]
Track = Annotated[
    list[str],
    typer.Option(
        "--track",
        metavar="NAME[:WHERE]",
        help="also pass the recorded rows to tensorboard, wandb, trackio or mlflow, offline unless WHERE is given: "
        "wandb:online, trackio:OWNER/SPACE, mlflow:ADDRESS; repeatable",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="FIRST:LAST", help="trace these training steps of each run for Perfetto"),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="CPU threads of each run on a CPU (default: what a trial step shows is faster)"),
]
ExecutorName = Annotated[
    str,
    typer.Option(
        "--executor", metavar="NAME", help="what runs the jobs: local, in-process, slurm, ray or that of a plugin"
    ),
]
SlurmSettings = Annotated[
    str | None,
    typer.Option(
        "--slurm",
        metavar="OPTIONS",
        help="options of sbatch for --executor slurm, such as 'partition=gpu, gres=gpu:4, time=4:00:00'; "
        "with prepare=N, N jobs prepare the text before",
    ),
]
RaySettings = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="OPTIONS",
        help="options of --executor ray: address, cpus, gpus, retries, prepare, records; such as 'address=auto, "
        "gpus=0.5'",
    ),
]
Figures = Annotated[
    Literal["svg", "pdf"] | None,
    typer.Option("--figures", help="also write each figure as a file of this format to the directory figures"),
]
LongLength = Annotated[
    int | None, typer.Option(min=32, max=LARGEST, help="length of this long sequence (with --thorough 1100)")
]
Only = Annotated[list[str], typer.Option("--only", help="take only this architecture and the reference; repeatable")]
NewMixer = Annotated[
    Path | None, typer.Option("--new", help="write a mixer to start from to this Python file, and check it")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=writable_file, help="also write all results to this file")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def load_plugins(plugins: Sequence[Path]) -> None:
    """Load plugin files; raises ConfigError when one cannot be loaded."""
    from basecap.plugins import load_plugin

    for path in plugins:
        load_plugin(path)


def executor_settings(executor: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the settings of the chosen executor; raises ConfigError where settings are for another one.

    Args:
        executor: the name that was chosen.
        given: the value of the option that is named after each executor, None where it was not given.

    >>> executor_settings("slurm", {"slurm": "partition=gpu, nodelist=n1,n2, exclusive"})
    {'partition': 'gpu', 'nodelist': 'n1,n2', 'exclusive': ''}
    """
    for name, text in given.items():
        if text is not None and name != executor:
            raise ConfigError(f"--{name} has settings of executor {name}; add --executor {name}.")
    parts = re.split(r",\s+|,(?=[\w-]+=)", given.get(executor) or "")
    settings = {}
    for part in (part.strip() for part in parts if part.strip()):
        name, _, value = part.partition("=")
        name = name.strip().lstrip("-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or name in settings:
            fault = "is given twice" if name in settings else "is no option"
            raise ConfigError(f"--{executor}: {part!r} {fault}; write options as 'name=value, name=value'.")
        settings[name] = value.strip()
    return settings


def seed_limit(study: "StudyConfig", until_decided: bool, most: int | None) -> int | None:
    """Return the largest number of seeds that the study may reach, None without `--until-decided`.

    Args:
        study: the study.
        until_decided: whether `--until-decided` was given.
        most: what was given with `--max-seeds`.

    Raises:
        ConfigError: a limit that is missing, too low or without `--until-decided`, or a study without verdicts.
    """
    if not until_decided:
        if most is not None:
            raise ConfigError("--max-seeds limits what --until-decided adds; give both, or set seeds instead.")
        return None
    if most is None:
        raise ConfigError("--until-decided needs a limit; add --max-seeds N.")
    count = len(study.seeds)
    if most < max(2, count):
        seeds = f"{count} seed{'s' if count > 1 else ''}"
        raise ConfigError(f"the study has {seeds} and --max-seeds is {most}; give at least {max(2, count)}.")
    if study.task is not None:
        raise ConfigError("a study of tasks has no verdicts to wait for; leave out --until-decided and set seeds.")
    if not study.text.ood:
        raise ConfigError("a study without unseen domains has no verdicts to wait for; leave out --until-decided.")
    import torch.distributed  # here, so that options are refused at once

    if torch.distributed.is_torchelastic_launched():
        raise ConfigError("--until-decided does not run under torchrun; without it runs go side by side on all GPUs.")
    return most


def log(line: str) -> None:
    """Print a line on standard error."""
    typer.echo(line, err=True)

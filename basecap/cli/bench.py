"""The commands of `basecap bench`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basecap.cli.options import LARGEST, Device, JsonFile, Plugins, Scale, load_plugins, log
from basecap.cli.output import print_table, store
from basecap.errors import ConfigError

if TYPE_CHECKING:
    from basecap.bench.contenders import Contenders

#: Vocabulary of models, and tokens per sequence of `bench models`, without a study.
VOCAB, LENGTH = 32_000, 2048

bench_app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)


@bench_app.command("ops", epilog="Example: basecap bench ops --json kernels.json")
def bench_ops(
    length: Annotated[
        int, typer.Option(min=256, max=LARGEST, help="sequence length of the training benchmark")
    ] = 102_400,
    peer: Annotated[bool, typer.Option("--peer", help="also the table peers: kernels of other libraries")] = False,
    table: Annotated[
        list[str],
        typer.Option(
            "--table",
            help="only this table: launch, training, skew, decode, crossover or peers; repeatable (default: all but "
            "peers)",
        ),
    ] = [],
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the Top-1 kernels with PyTorch's attention, and what launching each op costs. Needs a CUDA GPU."""
    from basecap.bench.ops import run as bench
    from basecap.system.environment import choose_device

    save = partial(store, path=json_file)
    found = bench(device=choose_device(device), length=length, peer=peer, only=table, save=save)
    for name, rows in found.items():
        if isinstance(rows, list):
            print_table(name, rows, as_json=False)
    if found["absent"]:
        names = ", ".join(f"{name} ({module})" for name, module in found["absent"].items())
        log(f"not installed, so not measured: {names}.")
    _finish(found, json_file)


BenchOnly = Annotated[
    list[str],
    typer.Option(
        "--only", help="only this architecture, or 'X in rwkv-7' for another backbone; repeatable (default: all)"
    ),
]
BenchStudy = Annotated[
    str | None,
    typer.Option(
        "--study", help="architectures, options, width and vocabulary of a study; --only then picks from its names"
    ),
]
Hidden = Annotated[int, typer.Option(min=1, max=LARGEST, help="model width")]


@bench_app.command(
    "models", epilog="Example: basecap bench models --only transformer++ --only mamba-2 --json models.json"
)
def bench_models(
    only: BenchOnly = [],
    study: BenchStudy = None,
    scale: Scale = None,
    hidden: Hidden = 768,
    length: Annotated[
        int | None,
        typer.Option(min=1, max=LARGEST, help=f"tokens per sequence (default: the study's, {LENGTH} without one)"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="sequences per step (default: 16, on a CPU 1)")
    ] = None,
    peer: Annotated[bool, typer.Option("--peer", help="also flash-linear-attention's own models, uncompiled")] = False,
    device: Device = None,
    json_file: JsonFile = None,
    plugin: Plugins = [],
) -> None:
    """Measure the training speed of whole architectures."""
    _refuse_scale_alone(study, scale)

    from basecap.bench.contenders import announcement
    from basecap.bench.models import BenchSetting, operations, shown
    from basecap.bench.models import run as bench
    from basecap.system.environment import choose_device

    load_plugins(plugin)
    models = _contenders(study, only, scale, hidden, length)
    first = next(iter(models.values()))
    place = choose_device(device)
    size = batch or (1 if place.type == "cpu" else 16)
    setting = BenchSetting(hidden=first.hidden, vocab=first.vocab, length=first.max_length, batch=size)
    if said := announcement(operations(models, setting), place):
        log(said)
    found = bench(models, setting, device=place, peer=peer, save=partial(store, path=json_file))
    print_table("training speed", [shown(row) for row in found["rows"]], as_json=False)
    _finish(found, json_file)


@bench_app.command("generate", epilog="Example: basecap bench generate --study bc-table-3 --json generate.json")
def bench_generate(
    only: BenchOnly = [],
    study: BenchStudy = None,
    scale: Scale = None,
    hidden: Hidden = 768,
    prompt: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens of each prompt")] = 51_200,
    new: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens to write after each")] = 5_120,
    batch: Annotated[int, typer.Option(min=1, max=LARGEST, help="sequences")] = 8,
    rows: Annotated[
        int | None,
        typer.Option(min=1, max=LARGEST, help="prompts to read at once, to save memory (default: the whole batch)"),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="only the table of one sequence: compiles no layers, seconds for each row")
    ] = False,
    device: Device = None,
    json_file: JsonFile = None,
    plugin: Plugins = [],
) -> None:
    """Measure how fast architectures read a prompt and write text: time to first token, tokens per second, memory."""
    _refuse_scale_alone(study, scale)

    from basecap.bench.contenders import announcement
    from basecap.bench.decoding import operations, shown, shown_alone
    from basecap.bench.decoding import run as bench
    from basecap.models.decoding_speed import Load
    from basecap.system.environment import choose_device

    load_plugins(plugin)
    load = Load(prompt=prompt, new=new, batch=batch, rows=rows)
    load = load.alone if alone else load
    models = _contenders(study, only, scale, hidden, load.length)
    place = choose_device(device)
    if said := announcement(operations(models, load), place):
        log(said)
    found = bench(models, load, device=place, alone=alone, save=partial(store, path=json_file))
    if not alone:
        print_table("generation", [shown(row) for row in found["rows"]], as_json=False)
    print_table("one sequence, tokens/s", shown_alone(found["rows"]), as_json=False)
    _finish(found, json_file)


def _refuse_scale_alone(study: str | None, scale: str | None) -> None:
    if scale is not None and study is None:
        raise ConfigError("--scale is that of a study; give one with --study.")


def _contenders(study: str | None, only: list[str], scale: str | None, hidden: int, length: int | None) -> "Contenders":
    from basecap.bench.contenders import named, of_study

    if study is None:
        return named(only, hidden=hidden, vocab=VOCAB, length=length or LENGTH)
    return of_study(study, only, scale=scale, length=length)


def _finish(found: dict[str, Any], path: Path | None) -> None:
    store(found, path)
    if not found["complete"]:
        log("interrupted: the tables show the measurements that finished.")
        raise typer.Exit(130)

"""The commands of `basecap bench`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from basecap.cli_options import LARGEST, Device, JsonFile, Plugins, load_plugins, log
from basecap.terminal import print_table, store

bench_app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)


@bench_app.command("ops", epilog="Example: basecap bench ops --json kernels.json")
def bench_ops(
    length: Annotated[
        int, typer.Option(min=256, max=LARGEST, help="sequence length of the training benchmark")
    ] = 102_400,
    peer: Annotated[bool, typer.Option("--peer", help="also flash-linear-attention's mixture of blocks")] = False,
    device: Device = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the Top-1 kernels with PyTorch's attention. Needs a CUDA GPU."""
    from basecap.bench.ops import run as bench
    from basecap.environment import choose_device

    found = bench(device=choose_device(device), length=length, peer=peer, keep=partial(store, path=json_file))
    for name, rows in found.items():
        if isinstance(rows, list):
            print_table(name, rows, as_json=False)
    _finish(found, json_file)


@bench_app.command(
    "models", epilog="Example: basecap bench models --use transformer++ --use mamba-2 --json models.json"
)
def bench_models(
    use: Annotated[
        list[str],
        typer.Option(
            "--use",
            help="time only this architecture, or 'X in rwkv-7' for another backbone; repeatable (default: all)",
        ),
    ] = [],
    hidden: Annotated[int, typer.Option(min=1, max=LARGEST, help="model width")] = 768,
    length: Annotated[int, typer.Option(min=1, max=LARGEST, help="tokens per sequence")] = 2048,
    batch: Annotated[int, typer.Option(min=1, max=LARGEST, help="sequences per step")] = 16,
    peer: Annotated[bool, typer.Option("--peer", help="also flash-linear-attention's own models, uncompiled")] = False,
    device: Device = None,
    json_file: JsonFile = None,
    plugin: Plugins = [],
) -> None:
    """Measure the training speed of whole architectures."""
    from basecap.bench.models import Setting
    from basecap.bench.models import run as bench
    from basecap.environment import choose_device

    load_plugins(plugin)
    keep = partial(store, path=json_file)
    setting = Setting(hidden=hidden, length=length, batch=batch)
    found = bench(use, setting, device=choose_device(device), peer=peer, keep=keep)
    print_table("training speed", found["rows"], as_json=False)
    _finish(found, json_file)


def _finish(found: dict[str, Any], path: Path | None) -> None:
    store(found, path)
    if not found["complete"]:
        log("interrupted: the tables show the measurements that finished.")
        raise typer.Exit(130)

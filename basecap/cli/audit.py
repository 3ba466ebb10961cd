"""`basecap audit`: how far, by what and how sharply the layers of a mixer or of a trained model read the past."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from basecap.cli.options import AsJson, Device, Plugins, load_plugins
from basecap.cli.output import print_table
from basecap.errors import ConfigError, nearest
from basecap.names import split_backbone


def audit(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MIXER|RUN",
            help="a mixer (`basecap list mixers`), untrained, or the directory of a trained run: DIR/runs/NAME-sSEED",
            show_default=False,
        ),
    ],
    length: Annotated[
        int, typer.Option(min=16, max=4096, help="tokens of a sequence; of a run at most its training length")
    ] = 256,
    device: Device = None,
    plugin: Plugins = [],
    as_json: AsJson = False,
) -> None:
    """Measure how far back each layer reads, whether by content, and whether it can select any one position."""
    load_plugins(plugin)
    from basecap.mixers import ARCHITECTURES

    run, name, known = Path(what), split_backbone(what)[0], ARCHITECTURES.names()
    if name in known:  # also where it looks like a path, as with "w/o conv"
        from basecap.models.audit import audits_of
        from basecap.system.environment import choose_device

        found = audits_of(what, length=length, device=choose_device(device))
    elif run.exists() or run.parent.name == "runs":
        from basecap.run.audited import audit_run

        found = audit_run(run, length, device)
    else:
        hint = nearest(name, known, see="basecap list mixers") + " For one in your own file, add --plugin FILE."
        raise ConfigError(f"{what!r} is neither a mixer nor the directory of a run: {hint}")
    if as_json:
        rows = [{**dataclasses.asdict(one), "sentence": one.sentence} for one in found]
    else:
        columns = ("visibility", "relation", "selection", "null")
        numbers = [
            {name: None if (value := getattr(one, name)) is None else round(value, 3) for name in columns}
            for one in found
        ]
        rows = [
            {"layer": one.layer, **row, "weights": one.weights, "what it says": one.sentence}
            for one, row in zip(found, numbers, strict=True)
        ]
    print_table(f"audit of {what}", rows, as_json)

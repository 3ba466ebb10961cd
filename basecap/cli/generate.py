"""`basecap generate`: text from a trained model."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from basecap.cli.options import LARGEST, Device, Plugins, load_plugins
from basecap.errors import ConfigError


def generate(
    run: Annotated[Path, typer.Argument(help="directory of a trained run: DIR/runs/NAME-sSEED")],
    prompts: Annotated[list[str], typer.Argument(help="texts to continue, of any lengths", show_default=False)] = [],
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts", help="file with a text on each line, or *.jsonl with JSON strings or {prompt: ...}"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="number of tokens to add")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="sampling temperature; 0 takes the most likely token")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="sample from the k most likely tokens")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the sampling")] = 0,
    stop: Annotated[
        list[str], typer.Option(help="text that ends a continuation and is left out; repeatable", show_default=False)
    ] = [],
    device: Device = None,
    plugin: Plugins = [],
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON: prompt, text, tokens and whether a stop text ended it")
    ] = False,
) -> None:
    """Continue one or more texts with a trained model, each as if it were alone."""
    from basecap.run.continue_text import continue_text, read_prompt_file
    from basecap.run.trained import info_of

    info_of(run)  # a wrong run is refused before a missing text is
    texts = [*prompts, *(read_prompt_file(prompts_file) if prompts_file else [])]
    if not texts:
        raise ConfigError("there is no text to continue; give one after the run, or --prompts FILE.")
    load_plugins(plugin)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed, "device": device}
    found = continue_text(run, texts, tokens, stops=stop, **options)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
        return
    for number, one in enumerate(found):
        typer.echo(("\n" if number else "") + one.prompt + one.text)

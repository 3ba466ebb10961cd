"""The models of runs."""

from collections.abc import Sequence
from pathlib import Path

from basecap.errors import ConfigError
from basecap.plugins import load_plugin
from basecap.records import RunRecords
from basecap.run.trained import TrainedModel, info_of, load_trained, stored_weights


def load_run(
    run: str | Path, *, step: int | None = None, device: str | None = None, plugins: Sequence[str | Path] = ()
) -> TrainedModel:
    """Return the trained model of a run, see `basecap.load`."""
    if isinstance(plugins, str | Path):
        raise ConfigError(f"plugins is one file; give a list, plugins=[{str(plugins)!r}].")
    for plugin in plugins:
        load_plugin(Path(plugin).expanduser())
    directory, device = Path(run).expanduser(), None if device is None else str(device)  # also a torch.device
    info = info_of(directory)
    if info.imported:
        return load_trained(directory, device=device)
    if step is None and not info.finished:
        stored = ", ".join(map(str, stored_weights(RunRecords(directory))))
        way_out = f", or load the weights of a step with step= ({stored})" if stored else ""
        state = f"failed ({info.message.rstrip('.')})" if info.status == "failed" else "is not finished"
        raise ConfigError(f"{directory} {state}; run its study again to resume it{way_out}.")
    from basecap.run.provenance import other_plugins  # these import torch, which takes seconds
    from basecap.train.checkpoint import stored_config

    absent, _ = other_plugins(info.plugins, stored_config(RunRecords(directory).resume))
    if absent:
        raise ConfigError(f"{directory} was trained with a plugin that is not given; add plugins={absent}.")
    return load_trained(directory, step=step, device=device)

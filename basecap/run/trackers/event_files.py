"""Tracker `tensorboard`: event files, which `tensorboard --logdir DIR/tracking/tensorboard` shows."""

from collections.abc import Mapping

from basecap.run.trackers._contract import TrackedRun, Tracker, tracker


@tracker("tensorboard")
class EventFiles(Tracker):
    """Writes the event files of a run into its directory, another file whenever the run goes on."""

    library = "tensorboard"
    places = (".+", "a directory")

    def __init__(self, run: TrackedRun):
        """Open an event file; `where` is another directory than that of the study."""
        from pathlib import Path

        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory if run.where is None else Path(run.where) / run.name))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the events to disk, which the library does every two minutes."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

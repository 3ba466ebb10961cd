"""Tracker `trackio`: runs of trackio, in its local database unless it is `trackio:OWNER/SPACE`."""

import contextvars
from collections.abc import Mapping

from basecap.run.trackers._contract import TrackedRun, Tracker, tracker


@tracker("trackio")
class TrackioRuns(Tracker):
    """Keeps a run in the local database, for `trackio show`."""

    library = "trackio"
    places = (r"[\w.-]+/[\w.-]+", "OWNER/SPACE")

    def __init__(self, run: TrackedRun):
        """Begin a run, or continue the one with its name and identity."""
        import trackio

        context = contextvars.Context()  # of its own, as the library has one run at a time in each
        self._run = context.run(
            lambda: trackio.init(
                project=run.study,
                name=f"{run.name}-{run.identity[:6]}",
                config=dict(run.about),
                resume="allow",
                space_id=run.where,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values at a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is in the database."""
        self._run.finish()

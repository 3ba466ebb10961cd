"""Tracker `wandb`: runs of Weights & Biases, offline unless it is `wandb:online`."""

from collections.abc import Mapping

from basecap.run.trackers._contract import TrackedRun, Tracker, tracker


@tracker("wandb")
class WandbRuns(Tracker):
    """Keeps a run in DIR/tracking/wandb, for `wandb sync`, or sends it to the server."""

    library = "wandb"
    places = ("online", "online")

    def __init__(self, run: TrackedRun):
        """Begin a run, or continue the one with its identity."""
        import wandb

        online = run.where == "online"
        self._run = wandb.init(
            project=run.study,
            name=run.name,
            id=run.identity,
            dir=str(run.directory),
            config=dict(run.about),
            mode="online" if online else "offline",
            resume="allow" if online else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values beside their step, as evaluations may come after later steps."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the process that the library started for the run."""
        self._run.finish()

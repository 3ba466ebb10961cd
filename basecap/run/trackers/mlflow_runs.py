"""Tracker `mlflow`: runs of MLflow, in DIR/tracking/mlflow.db unless it is `mlflow:ADDRESS`."""

import re
import time
from collections.abc import Mapping
from typing import Any

from basecap.run.trackers._contract import TrackedRun, Tracker, tracker

#: The tag that a run is found by when it goes on.
TAG = "basecap.run"
#: The most metrics of a request, and what their names may not have.
AT_ONCE, FOREIGN = 1000, r"[^\w .:/-]"


@tracker("mlflow")
class MlflowRuns(Tracker):
    """Keeps a run in a database, for `mlflow ui --backend-store-uri sqlite:///DIR/tracking/mlflow.db`, or a server."""

    library = "mlflow"
    places = (r"databricks|[a-z][a-z0-9+-]*:.+", "an address such as http://HOST:PORT")

    def __init__(self, run: TrackedRun):
        """Begin a run, or continue the one with its identity."""
        from mlflow.tracking import MlflowClient

        self._held: list[Any] = []
        address = run.where or f"sqlite:///{run.directory.parent.absolute()}.db"
        self._client = MlflowClient(tracking_uri=address)
        found = self._client.get_experiment_by_name(run.study)
        experiment = self._client.create_experiment(run.study) if found is None else found.experiment_id
        held = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run.identity}'")
        if held:
            self._id = held[0].info.run_id
        else:
            tags = {TAG: run.identity, "mlflow.runName": run.name}
            self._id = self._client.create_run(experiment, tags=tags).info.run_id
            for name, value in run.about.items():
                self._client.log_param(self._id, name, value)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hold a metric for each value: the library takes many at once in the time of one."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._held += [Metric(re.sub(FOREIGN, "_", name), value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Log what is held."""
        for first in range(0, len(self._held), AT_ONCE):
            self._client.log_batch(self._id, metrics=self._held[first : first + AT_ONCE])
        self._held = []

    def close(self) -> None:
        """Nothing is held: a run that goes on later stays as it is."""

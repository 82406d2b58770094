"""Loggers for MLflow and trackio that continue the same run after a resume.

wandb's own logger does so by its id.
"""

from functools import partial
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


def mlflow(run_id: str, experiment_name: str, tracking_uri: str, **options: Any) -> MLFlowLogger:
    """Return Lightning's MLFlowLogger with its `options`.

    It continues the MLflow run that is named `run_id`, if there is one.
    """
    mlflow_id = None
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri)
        experiment = client.get_experiment_by_name(experiment_name)
        if experiment:
            query = f"attributes.run_name = '{run_id}'"
            runs = client.search_runs([experiment.experiment_id], query)
            mlflow_id = runs[0].info.run_id if runs else None
    return MLFlowLogger(experiment_name, run_id, tracking_uri, run_id=mlflow_id, **options)


class Trackio(Logger):
    """Log to trackio (https://github.com/gradio-app/trackio).

    Args:
        space_id: "user/name" of a Hugging Face Space; None: to the folder TRACKIO_DIR, and nothing
            leaves this machine.
    """

    name = "trackio"  # type: ignore[assignment]
    version = ""  # type: ignore[assignment]

    def __init__(self, run_id: str, project: str, space_id: str | None = None) -> None:
        super().__init__()
        import trackio

        # It begins the run, or continues it.
        self.begin_run = partial(
            trackio.init, project, run_id, space_id=space_id, resume="allow", embed=False
        )
        self.run: Any = None
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self.run = self.begin_run()

    @property
    def experiment(self) -> Any:
        """Return the run of trackio; None on other ranks, and after the training."""
        return self.run

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.run is None:
            # A test follows the training, at whose end Lightning has finalized the loggers.
            self.run = self.begin_run()
        self.run.log(metrics, step)

    def finalize(self, status: str) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None

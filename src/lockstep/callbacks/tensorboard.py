"""TensorBoard files in the run folder; a restarted run goes on in one curve."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class TensorBoard(Logger):
    """
    Args:
        folder: where the event files go.
        resume_step: what was written after this step is hidden by TensorBoard's purge.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.folder, self.resume_step = Path(folder), resume_step
        self.writer: Any = None

    @property
    def name(self) -> str:
        return "tensorboard"

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        """torch's SummaryWriter on rank zero, whose methods do nothing on other ranks."""
        return _Experiment(self)

    def open(self) -> Any:
        """The writer; its import takes most of a second."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if self.resume_step is None else self.resume_step + 1
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
        return self.writer

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """The run folder holds config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            if name not in ("epoch", "time_s"):
                self.open().add_scalar(name, value, step)

    @rank_zero_only
    def save(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class _Experiment:
    """Makes the writer when one of its methods is called: Lightning asks each rank for `experiment` at the start."""

    def __init__(self, board: TensorBoard) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return rank_zero_only(lambda *args, **kwargs: getattr(self._board.open(), name)(*args, **kwargs))

"""Compare the images of a run beside its training: on a slow disk that takes many minutes."""

import logging
import threading
from typing import Any

import lightning.pytorch as pl

from lockstep.data import report
from lockstep.records.folder import RunFolder

log = logging.getLogger(__name__)

# Most data are compared within this time, so that their report comes before the first step.
WAIT_AT_START_S = 3.0
# Rank 0 waits this long at the end, while the other ranks wait for it in a collective.
WAIT_AT_END_S = 1.0


class DataReport(pl.Callback):
    """The report of a run's images, which rank 0 makes in a thread.

    Args:
        data: a prepared ImageDataModule.
        folder: gets the names of images that were left out or are identical.

    Attributes:
        summary: `data_report` of run.json; {} until all images are compared.
    """

    def __init__(self, data: Any, folder: RunFolder) -> None:
        self.data = data
        self.folder = folder
        self.summary: dict[str, Any] = {}
        self._thread = threading.Thread(
            target=self._compare_images, name="data-report", daemon=True
        )

    def start(self) -> None:
        """Start to compare the images, and wait for the end up to WAIT_AT_START_S."""
        if not self.data.source.reads_files:
            # Arrays are compared in memory. A Dataset of the user's is not compared, because it may
            # draw random numbers of this process. A few of its images are opened for their size.
            self._compare_images()
            return
        self._thread.start()
        self._thread.join(WAIT_AT_START_S)
        if self._thread.is_alive():
            log.info("The images are compared with each other while the training begins.")

    def _compare_images(self) -> None:
        try:
            result = report.make_report(self.data)
        except OSError as error:
            log.warning(f"The images were not compared with each other ({error}).")
            return
        report.write_findings(self.folder.path, result.findings)
        report.log_findings(result.findings)
        self.summary = result.fields

    def record_fields(self) -> dict[str, object]:
        """Return the fields of run.json."""
        return {"data_report": self.summary} if self.summary else {}

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._thread.is_alive():
            return
        self._thread.join(WAIT_AT_END_S)
        if self._thread.is_alive():
            log.info(
                "The training has ended before all images were compared with each other: "
                "`python src/check_data.py` compares them."
            )

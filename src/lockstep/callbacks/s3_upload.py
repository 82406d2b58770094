"""The callback that uploads a run to S3 while it trains, around storage/uploader.py."""

import logging
import time
from pathlib import Path

import lightning.pytorch as pl

from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.folder import RunFolder
from lockstep.storage.errors import S3Error
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import Uploader

log = logging.getLogger(__name__)

FLUSH_WHEN_INTERRUPTED_S, FLUSH_BESIDE_OTHER_RANKS_S, FLUSH_AFTER_FAILURE_S = 60.0, 30.0, 3.0


class S3Upload(pl.Callback):
    """Upload a run to s3://bucket/prefix/<the last part of run_folder>.

    Args:
        required: end the run before training if the bucket cannot be written; else train on and keep trying.
        flush_timeout_s: how long the end of fit may wait for what is not yet uploaded.
    """

    def __init__(
        self, run_folder: str | Path, uri: str, endpoint_url: str | None = None, required: bool = True,
        flush_timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.folder, self.required, self.flush_timeout_s = RunFolder(Path(run_folder)), required, flush_timeout_s
        self.bucket = Bucket(uri, endpoint_url)
        self.uploader: Uploader | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.uploader is not None:
            return
        fault, run = None, self.bucket.at(self.folder.run_id)
        if trainer.is_global_zero:
            try:
                run.check_writable()
            except S3Error as error:
                fault = f"{self.bucket.uri} cannot be used: {error}"
        fault = trainer.strategy.broadcast(fault, src=0)
        if fault and self.required:
            raise UserError(f"{fault} (s3.required=false trains without it).")
        if fault and trainer.is_global_zero:
            log.info(f"s3: {fault}; training starts, uploads are tried again.")
        if trainer.is_global_zero:
            self.uploader = Uploader(run, self.folder, time.time())
            self.uploader.start()

    def expect_end(self, seconds: float) -> None:
        """Upload the newest checkpoints at once from now on, because this machine stops in so many seconds."""
        self.flush_timeout_s = min(self.flush_timeout_s, seconds)
        if self.uploader is not None:
            self.uploader.intervals_s["last"] = 0.0
            self.uploader.flush(0.0)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        failed_s = FLUSH_AFTER_FAILURE_S if trainer.world_size > 1 else self.flush_timeout_s
        self._end(FLUSH_WHEN_INTERRUPTED_S if isinstance(exception, Interrupted) else failed_s)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end(FLUSH_BESIDE_OTHER_RANKS_S if trainer.world_size > 1 else self.flush_timeout_s)

    def _end(self, timeout_s: float) -> None:
        if self.uploader is not None:
            self.uploader.flush(min(timeout_s, self.flush_timeout_s))
            self.uploader.stop()

    def record_fields(self) -> dict[str, object]:
        return {} if self.uploader is None else {"upload": self.uploader.status()}

"""Upload a run to S3 while it trains: the callback around storage/uploader.py."""

import logging
import time
from pathlib import Path

import lightning.pytorch as pl

from lockstep.process.errors import Interrupted, UserError
from lockstep.records.folder import RunFolder
from lockstep.storage.errors import S3Error
from lockstep.storage.pointers import read_pointers, refuse_other_run
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import FLUSH_TIMEOUT_S, Uploader

log = logging.getLogger(__name__)

# The end of a training waits at most so long for uploads, because other ranks wait in a collective
# meanwhile. `finish_upload` sends what is left.
FLUSH_WHEN_INTERRUPTED_S = 60.0
FLUSH_BESIDE_OTHER_RANKS_S = 30.0
FLUSH_AFTER_FAILURE_S = 3.0


class S3Upload(pl.Callback):
    """Upload a run to s3://bucket/prefix/<the last part of run_folder>.

    If another run of the same id is there, this run ends before training.

    Args:
        required: end the run before training if the bucket cannot be written. Without it the run
            trains, and the uploads are tried again.
        flush_timeout_s: how long the end of fit may wait for files that are not uploaded yet; None:
            as long as by default.
    """

    def __init__(
        self,
        run_folder: str | Path,
        uri: str,
        endpoint_url: str | None = None,
        required: bool = True,
        flush_timeout_s: float | None = FLUSH_TIMEOUT_S,
    ) -> None:
        self.folder = RunFolder(Path(run_folder))
        self.bucket = Bucket(uri, endpoint_url)
        self.required = required
        self.flush_timeout_s = FLUSH_TIMEOUT_S if flush_timeout_s is None else flush_timeout_s
        self.uploader: Uploader | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to upload on rank 0 in each fit; end the run on all ranks if it may not."""
        if stage != "fit":
            return
        refusal = None
        if trainer.is_global_zero:
            try:
                self._start_upload()
            except UserError as error:
                refusal = str(error)
        refusal = trainer.strategy.broadcast(refusal, src=0)
        if refusal:
            raise UserError(refusal)

    def _start_upload(self) -> None:
        """Claim the run's place in the bucket, and start the upload thread.

        Raises:
            UserError: another run of this id is there, or a required bucket cannot be written.
        """
        bucket = self.bucket.joinpath(self.folder.run_id)
        is_usable = self._is_usable(bucket)
        uploader = Uploader(bucket, self.folder, time.time())
        if is_usable:
            claim_before_training(uploader)
        self.uploader = uploader
        uploader.start()

    def _is_usable(self, bucket: Bucket) -> bool:
        """Return whether the bucket can be written; raise UserError if it has to be."""
        try:
            refuse_other_run(bucket, read_pointers(bucket), self.folder)
            bucket.check_writable()
        except S3Error as error:
            message = f"{self.bucket.uri} cannot be used: {error}"
            if self.required:
                raise UserError(f"{message} (s3.required=false trains without it).") from None
            log.info(f"s3: {message}; training starts, uploads are tried again.")
            return False
        return True

    def expect_end(self, seconds: float) -> None:
        """Upload new checkpoints at once from now on, because this machine stops in `seconds`."""
        self.flush_timeout_s = min(self.flush_timeout_s, seconds)
        if self.uploader is not None:
            self.uploader.intervals_s["last"] = 0.0
            # This wakes the thread and does not wait for it.
            self.uploader.flush(0.0)

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        if isinstance(exception, Interrupted):
            self._flush_and_stop(FLUSH_WHEN_INTERRUPTED_S)
        elif trainer.world_size > 1:
            self._flush_and_stop(FLUSH_AFTER_FAILURE_S)
        else:
            self._flush_and_stop(self.flush_timeout_s)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            self._flush_and_stop(FLUSH_BESIDE_OTHER_RANKS_S)
        else:
            self._flush_and_stop(self.flush_timeout_s)

    def _flush_and_stop(self, timeout_s: float) -> None:
        if self.uploader is not None:
            self.uploader.flush(min(timeout_s, self.flush_timeout_s))
            self.uploader.stop()

    def record_fields(self) -> dict[str, object]:
        if self.uploader is None:
            return {}
        return {"uuid": self.uploader.uuid, "upload": self.uploader.status()}


def claim_before_training(uploader: Uploader) -> None:
    """Claim the run's place in the bucket, so that of two new runs of one id one is refused.

    Raises:
        OtherRunError: another run has claimed the place.
    """
    # Another start may claim the place after its pointers are read: then read them once more.
    for _ in range(2):
        try:
            uploader.claim()
            return
        except S3Error as error:
            # The upload thread claims again, and logs the error.
            if error.code != "PreconditionFailed":
                return

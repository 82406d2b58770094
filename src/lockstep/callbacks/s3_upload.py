"""The callback that uploads a run to S3 while it trains, around storage/uploader.py."""

import logging
import time
from pathlib import Path

import lightning.pytorch as pl

from lockstep.process.errors import Interrupted, UserError
from lockstep.records.folder import RunFolder
from lockstep.storage.errors import OtherRunError, S3Error
from lockstep.storage.pointers import read_pointers, refuse_other_run
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import Uploader

log = logging.getLogger(__name__)

# The longest that an end waits for uploads. Other ranks wait in a collective meanwhile, and
# `finish_upload` sends what is left.
FLUSH_WHEN_INTERRUPTED_S = 60.0
FLUSH_BESIDE_OTHER_RANKS_S = 30.0
FLUSH_AFTER_FAILURE_S = 3.0


class S3Upload(pl.Callback):
    """Upload a run to s3://bucket/prefix/<the last part of run_folder>.

    A place that holds another run is refused: the run ends before training.

    Args:
        required: end the run before training if the bucket cannot be written; else train on and
            keep trying.
        flush_timeout_s: how long the end of fit may wait for what is not yet uploaded.
    """

    def __init__(
        self,
        run_folder: str | Path,
        uri: str,
        endpoint_url: str | None = None,
        required: bool = True,
        flush_timeout_s: float = 300.0,
    ) -> None:
        self.folder = RunFolder(Path(run_folder))
        self.bucket = Bucket(uri, endpoint_url)
        self.required = required
        self.flush_timeout_s = flush_timeout_s
        self.uploader: Uploader | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Each fit starts an upload of its own: the end of one before has stopped its thread.
        if stage != "fit":
            return
        refusal = self._start_or_refuse() if trainer.is_global_zero else None
        refusal = trainer.strategy.broadcast(refusal, src=0)
        if refusal:
            raise UserError(refusal)

    def _start_or_refuse(self) -> str | None:
        """Claim the run's place in the bucket and start to upload; return why the run must end."""
        bucket = self.bucket.joinpath(self.folder.run_id)
        s3_error: S3Error | None = None
        try:
            refuse_other_run(bucket, read_pointers(bucket), self.folder)
            bucket.check_writable()
        except OtherRunError as error:
            return str(error)
        except S3Error as error:
            s3_error = error
        message = f"{self.bucket.uri} cannot be used: {s3_error}"
        if s3_error and self.required:
            return f"{message} (s3.required=false trains without it)."

        uploader = Uploader(bucket, self.folder, time.time())
        if s3_error:
            log.info(f"s3: {message}; training starts, uploads are tried again.")
        else:
            refusal = self._claim(uploader)
            if refusal:
                return refusal
        self.uploader = uploader
        uploader.start()
        return None

    def _claim(self, uploader: Uploader) -> str | None:
        """Claim the place before training: of two new runs of one id the second is refused.

        Other errors are those of the upload thread, which claims again and logs them.
        """
        for _ in range(2):
            try:
                uploader.claim()
                return None
            except OtherRunError as error:
                return str(error)
            except S3Error as error:
                # Another start has claimed it since its pointers were read: read them once more.
                if error.code != "PreconditionFailed":
                    return None
        return None

    def expect_end(self, seconds: float) -> None:
        """Upload new checkpoints at once from now on, because this machine stops in `seconds`."""
        self.flush_timeout_s = min(self.flush_timeout_s, seconds)
        if self.uploader is not None:
            self.uploader.intervals_s["last"] = 0.0
            # Wake the thread, and do not wait for it.
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

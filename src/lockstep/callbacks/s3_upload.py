"""The callback that uploads a run to S3 while it trains, around storage/uploader.py."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.folder import RunFolder
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.errors import S3Error
from lockstep.storage.pointer import KINDS
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import FILES_INTERVAL_S, LAST_INTERVAL_S, Uploader, note

log = logging.getLogger(__name__)

# With several ranks, the others wait in a collective meanwhile; storage/finish.py sends the rest when they have ended.
FLUSH_BESIDE_OTHER_RANKS_S = 30.0
FLUSH_AFTER_FAILURE_S = 3.0
FLUSH_WHEN_INTERRUPTED_S = 60.0


class S3Upload(Callback):
    """
    Args:
        run_folder: logs/train/runs/<run_id>; the last part names the run in the bucket.
        uri: s3://bucket/prefix.
        endpoint_url: the address of a store other than Amazon's.
        required: end the run before training if the bucket cannot be written; else train on and keep trying.
        flush_timeout_s: how long the end of the run may wait for what is not yet uploaded.
        last_interval_s: seconds between two uploads of the last checkpoint.
        files_interval_s: seconds between two uploads of record, metrics and TensorBoard files that changed.
        storage: storage_class, server_side_encryption, sse_kms_key_id as in the config group s3.
    Raises:
        UserError: at the start of fit, in one sentence, what is wrong with the bucket.
    """

    def __init__(
        self,
        run_folder: str | Path,
        uri: str,
        endpoint_url: str | None = None,
        required: bool = True,
        flush_timeout_s: float = 300.0,
        last_interval_s: float = LAST_INTERVAL_S,
        files_interval_s: float = FILES_INTERVAL_S,
        **storage: Any,
    ) -> None:
        self.folder, self.required, self.flush_timeout_s = RunFolder(Path(run_folder)), required, flush_timeout_s
        self.bucket = Bucket.of({"uri": uri, "endpoint_url": endpoint_url, **storage})
        self.intervals_s = last_interval_s, files_interval_s
        self.until: float | None = None  # when this machine goes, or the end of the run has waited long enough
        self.uploader: Uploader | None = None
        self.stalled_s = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.uploader is not None:
            return
        fault = trainer.strategy.broadcast(self._fault() if trainer.is_global_zero else None, src=0)
        if fault and self.required:
            raise UserError(f"{self.bucket.uri} cannot be used: {fault} (s3.required=false trains without it).")
        if not trainer.is_global_zero:
            return
        if fault:
            log.info(f"s3: {self.bucket.uri} cannot be used now: {fault}; training starts, uploads are tried again.")
        start = time.time()
        note(self.folder, start=start, until=None)
        self.uploader = Uploader(self.bucket.at(self.folder.run_id), self.folder, start, *self.intervals_s)
        for kind in KINDS:  # what an earlier start could not send
            for path, _ in list(complete(self.folder.checkpoints, kind))[:1]:
                self.uploader.offer(path, kind, only_forward=True)
        self.uploader.start()

    def _fault(self) -> str | None:
        try:
            if not self.bucket.at(self.folder.run_id).check_writable():
                log.info("s3: the store does not honour conditional writes: start only one process of a run at a time.")
        except S3Error as error:
            return str(error)
        return None

    def on_checkpoint_complete(self, path: Path, sidecar: Any, kind: str) -> None:
        """Called by Checkpoints on rank 0; costs a hard link."""
        if self.uploader is not None:
            started = time.monotonic()
            self.uploader.offer(path, kind)
            self.stalled_s += time.monotonic() - started

    def expect_end(self, seconds: float) -> None:
        """Send the next `last` first and wait for nothing longer, because this machine goes in so many seconds."""
        self.until = min(self.until or float("inf"), time.time() + seconds)
        if self.uploader is not None:
            note(self.folder, until=self.until)
            self.uploader.hurry()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):
            self.expect_end(FLUSH_WHEN_INTERRUPTED_S)
        self.flush(FLUSH_AFTER_FAILURE_S if trainer.world_size > 1 and not self.until else self.flush_timeout_s)
        if self.uploader is not None:
            self.uploader.stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.flush(FLUSH_BESIDE_OTHER_RANKS_S if trainer.world_size > 1 else self.flush_timeout_s)
        if self.uploader is not None:
            self.uploader.stop()

    def flush(self, timeout_s: float) -> None:
        if self.uploader is not None:
            self.until = self.until or time.time() + self.flush_timeout_s
            note(self.folder, until=self.until)
            self.uploader.flush(max(0.0, min(timeout_s, self.until - time.time())))

    def record_fields(self) -> dict[str, object]:
        if self.uploader is None:
            return {}
        return {"upload": asdict(self.uploader.status()), "upload_stall_s": round(self.stalled_s, 4)}

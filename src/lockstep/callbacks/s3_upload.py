"""Sends the run to S3 while it trains: a thin hook of Lightning around uploader.py."""

import logging
import secrets
import time
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.runs.errors import Interrupted, UserError
from lockstep.runs.folder import RunFolder
from lockstep.storage.checkpoint_files import Sidecar
from lockstep.storage.object_store import ObjectStore, StoreError
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options
from lockstep.storage.uploader import Uploader, UploadStatus

log = logging.getLogger(__name__)

# Where one rank fails, the supervisor ends the others soon; what is left then, storage/finish.py sends in their place
FLUSH_BESIDE_OTHER_RANKS_S = 3.0
FLUSH_WHEN_INTERRUPTED_S = 60.0
FLUSH_BEFORE_TEST_S = 30.0  # the other ranks wait in a collective meanwhile


class S3Upload(Callback):
    """
    Args:
        run_folder: logs/train/runs/<run_id>; the last part names the run in the bucket.
        uri: s3://bucket/prefix.
        required: end the run before training where the bucket cannot be written; else train on and keep trying.
        flush_timeout_s: how long the end of the run may wait for what is not yet uploaded.
        store: in place of the one at `uri`.
    Raises:
        UserError: at the start, in one sentence, what is wrong with the bucket.
    """

    def __init__(
        self,
        run_folder: str | Path,
        uri: str,
        endpoint_url: str | None = None,
        required: bool = True,
        flush_timeout_s: float = 300.0,
        last_interval_s: float = 600.0,
        files_interval_s: float = 60.0,
        storage_class: str | None = None,
        server_side_encryption: str | None = None,
        sse_kms_key_id: str | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 30.0,
        store: ObjectStore | None = None,
    ) -> None:
        self.options = S3Options(
            uri, endpoint_url, storage_class, server_side_encryption, sse_kms_key_id, connect_timeout_s, read_timeout_s
        )
        self.folder, self.required, self.store = RunFolder(Path(run_folder)), required, store
        self.flush_left_s = flush_timeout_s
        self.last_interval_s, self.files_interval_s = last_interval_s, files_interval_s
        self.deadline: float | None = None
        self.uploader: Uploader | None = None
        self.stalled_s = 0.0

    # Start

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.uploader is not None:
            return
        start_id = trainer.strategy.broadcast(secrets.token_hex(8), src=0)
        self.rank = trainer.global_rank
        run = RunBucket(self.store or S3Store(self.options), self.folder.run_id, start_id)
        fault = trainer.strategy.broadcast(_fault(run) if self.rank == 0 else None, src=0)
        if fault and self.required:
            raise UserError(f"{self.options.uri} cannot be used: {fault} (s3.required=false trains without it).")
        if fault:
            log.info(f"s3: {self.options.uri} cannot be used now: {fault}; training starts, uploads are tried again.")
        if self.rank != 0:
            return
        self.uploader = Uploader(
            run,
            self.folder,
            rank=self.rank,
            last_interval_s=self.last_interval_s,
            files_interval_s=self.files_interval_s,
        )
        # The earlier start may have been told to hurry.
        self.uploader.outbox.note(deadline=self.deadline, flush_left_s=self.flush_left_s)
        self.uploader.start()

    # While it trains

    def on_checkpoint_complete(self, path: Path, sidecar: Sidecar, kind: str) -> None:
        """Called by the checkpoints' callback once a checkpoint is complete; costs a hard link."""
        if self.uploader is not None:
            started = time.monotonic()
            self.uploader.offer(kind, path, sidecar)
            self.stalled_s += time.monotonic() - started

    def expect_end(self, seconds: float) -> None:
        """This machine goes in so many seconds: the next `last` is sent first, and nothing waits longer."""
        self.deadline = min(self.deadline or float("inf"), time.time() + seconds)
        if self.uploader is not None:
            self.uploader.outbox.note(deadline=self.deadline)
            self.uploader.hurry()

    # End

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Interrupted):
            self.expect_end(FLUSH_WHEN_INTERRUPTED_S)
            self.flush(FLUSH_WHEN_INTERRUPTED_S)
        else:
            self.flush(FLUSH_BESIDE_OTHER_RANKS_S if trainer.world_size > 1 else self.flush_left_s)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.flush(FLUSH_BEFORE_TEST_S if trainer.world_size > 1 else self.flush_left_s)

    def flush(self, timeout_s: float) -> None:
        """Wait for what is not yet there, then end the thread; the outbox keeps the rest for storage/finish.py."""
        if self.uploader is None or not self.uploader.is_alive:
            return
        if self.deadline is not None:
            timeout_s = min(timeout_s, self.deadline - time.time())
        started = time.monotonic()
        self.uploader.flush(max(0.0, min(timeout_s, self.flush_left_s)))
        self.uploader.stop()
        self.flush_left_s = max(0.0, self.flush_left_s - (time.monotonic() - started))
        generation = self.uploader.run.generation
        reached = {"generation": generation} if generation else {}
        self.uploader.outbox.note(flush_left_s=self.flush_left_s, **reached)

    # For others

    def upload_status(self) -> UploadStatus:
        """Of the best; its `error` is None where it is in the bucket."""
        return self.uploader.status() if self.uploader is not None else UploadStatus()

    def record_fields(self) -> dict[str, object]:
        if self.uploader is None:
            return {}
        return {"upload": asdict(self.upload_status()), "upload_stall_s": round(self.stalled_s, 4)}


def _fault(run: RunBucket) -> str | None:
    """Try the bucket and become the newest start of the run; what is wrong, in a sentence."""
    try:
        if not run.store.probe(run.root):
            log.info(
                "s3: this store does not honour conditional writes: start only one process of this run at a time, "
                "or an older one may move best.json back."
            )
        run.prepare()
    except StoreError as error:
        return str(error)
    return None

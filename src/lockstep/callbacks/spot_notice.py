"""EC2's notice that a spot instance will be taken: save, upload, and be gone before it is."""

import http.client
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.interruption import Interruption
from lockstep.runs.errors import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

END_AFTER_S = 90.0  # of the two minutes that EC2 gives at best
TOKEN_SECONDS = 21600
METADATA = "http://169.254.169.254"  # the link-local address that every EC2 instance has


class MetadataService:
    """Instance metadata with a session token (IMDSv2).

    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        self.address, self.timeout_s = address.rstrip("/"), timeout_s
        self.token: str | None = None

    def _ask(self, path: str, method: str = "GET", **headers: str) -> str:
        request = urllib.request.Request(f"{self.address}/latest/{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        with opener.open(request, timeout=self.timeout_s) as answer:
            return answer.read(4096).decode()

    def notice(self) -> str | None:
        """The notice's text, or None while there is none.

        Raises:
            OSError: the service does not answer, or not in this way.
        """
        for _attempt in range(2):
            if self.token is None:
                seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                self.token = self._ask("api/token", "PUT", **seconds)
            try:
                return self._ask("meta-data/spot/instance-action", **{"X-aws-ec2-metadata-token": self.token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
                self.token = None  # it has expired: once more with a new one
        return None


class SpotNotice(Callback):
    """Polls the metadata service from a thread and asks for an interruption when a notice comes.

    Args:
        address: of the metadata service; tests point it at a server of their own.
        interval_s: seconds between two polls; AWS recommends 5.
        end_after_s: seconds from the notice to the end of this process, whatever it still does.
        fetch: asked instead of the service, where given.
    """

    def __init__(
        self,
        address: str = METADATA,
        interval_s: float = 5.0,
        end_after_s: float = END_AFTER_S,
        fetch: Callable[[], str | None] | None = None,
    ) -> None:
        self.fetch = fetch or MetadataService(address).notice
        self.interval_s, self.end_after_s = interval_s, end_after_s
        self.ended = threading.Event()
        self.noticed_at: float | None = None
        self.complained = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.interruption = next(c for c in trainer.callbacks if isinstance(c, Interruption))
        self.uploads = [c for c in trainer.callbacks if hasattr(c, "expect_end")]
        if trainer.local_rank == 0 and stage in ("fit", "test"):
            self.ended = threading.Event()  # the thread of a stage before may still be asking
            threading.Thread(target=self._poll, name="spot-notice", daemon=True).start()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.ended.set()

    def _poll(self) -> None:
        ended = self.ended
        while not ended.is_set():
            try:
                notice = self.fetch()
            except (OSError, ValueError, http.client.HTTPException) as error:
                if not self.complained:
                    log.info(f"No spot notices can be had ({error}); asking again every {self.interval_s:.0f} s.")
                self.complained, notice = True, None
            if notice:
                self.noticed_at = time.time()
                log.info(f"Spot notice: {notice.strip()}")
                self.interruption.ask("spot notice")
                for upload in self.uploads:
                    upload.expect_end(self.end_after_s - 5)
                return self._end_in_time()
            ended.wait(self.interval_s)

    def _end_in_time(self) -> None:
        """The machine goes soon: a checkpoint or an upload that hangs must not hold this process."""
        if not self.ended.wait(self.end_after_s):
            log.info(f"Not done {self.end_after_s:.0f} s after the spot notice: ending now.")
            os._exit(EXIT_INTERRUPTED)

    def record_fields(self) -> dict[str, object]:
        return {} if self.noticed_at is None else {"spot_notice_at": self.noticed_at}

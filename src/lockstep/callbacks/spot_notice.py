"""Poll EC2 for a spot interruption notice, to save, upload and exit before the instance goes."""

import http.client
import logging
import threading
import urllib.error
import urllib.request

import lightning.pytorch as pl

from lockstep.callbacks.interruption import Interruption

log = logging.getLogger(__name__)

# Every EC2 instance has its metadata service at this address.
METADATA = "http://169.254.169.254"
# EC2 gives two minutes at best. This much is left for checkpoint and upload.
SECONDS_LEFT = 85.0


class SpotNotice(pl.Callback):
    """Poll the metadata service (IMDSv2) from a thread and ask for an interruption at a notice.

    AWS recommends an interval of 5 s:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(self, address: str = METADATA, interval_s: float = 5.0) -> None:
        self.address = address.rstrip("/")
        self.interval_s = interval_s
        self.has_ended = threading.Event()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.local_rank != 0 or stage not in ("fit", "test"):
            return

        # The thread of an earlier stage may still be asking. It keeps the event of its stage.
        self.has_ended = threading.Event()
        thread = threading.Thread(
            target=self._poll, args=(trainer, self.has_ended), name="spot-notice", daemon=True
        )
        thread.start()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.has_ended.set()

    def _poll(self, trainer: pl.Trainer, has_ended: threading.Event) -> None:
        """Wait for a notice, and pass it on; return without one if the stage has ended."""
        notice = self._wait_for_notice(has_ended)
        if not notice:
            return

        log.info(f"Spot notice: {notice.strip()}")
        for callback in trainer.callbacks:
            if isinstance(callback, Interruption):
                callback.request_stop("spot notice")
            if hasattr(callback, "expect_end"):
                callback.expect_end(SECONDS_LEFT)

    def _wait_for_notice(self, has_ended: threading.Event) -> str:
        """Return the text of the notice; empty if the stage has ended before one came."""
        has_complained = False
        while True:
            try:
                notice = self._request_notice()
            except (OSError, ValueError, http.client.HTTPException) as error:
                notice = ""
                if not has_complained:
                    log.info(
                        f"No answer about spot notices ({error}); "
                        f"asking again every {self.interval_s:.0f} s."
                    )
                    has_complained = True

            if notice or has_ended.wait(self.interval_s):
                return notice

    def _request_notice(self) -> str:
        """Return the text of the notice; empty while the service answers 404, which means none."""
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        try:
            token = self._request("api/token", "PUT", lifetime)
            authorization = {"X-aws-ec2-metadata-token": token}
            return self._request("meta-data/spot/instance-action", "GET", authorization)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def _request(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(
            f"{self.address}/latest/{path}", method=method, headers=headers
        )
        # An empty ProxyHandler: the service is never reached through a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=2.0) as answer:
            return str(answer.read(4096).decode())

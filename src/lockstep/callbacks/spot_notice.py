"""Poll EC2 for a spot interruption notice: save, upload, and exit before the instance is reclaimed."""

import http.client
import logging
import threading
import urllib.error
import urllib.request

import lightning.pytorch as pl

from lockstep.callbacks.interruption import Interruption

log = logging.getLogger(__name__)

METADATA = "http://169.254.169.254"  # of every EC2 instance
SECONDS_LEFT = 85.0  # for checkpoint and upload, of the two minutes that EC2 gives at best


class SpotNotice(pl.Callback):
    """Poll the metadata service (IMDSv2) from a thread and ask for an interruption when a notice comes.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, which
    recommends an interval of 5 s.
    """

    def __init__(self, address: str = METADATA, interval_s: float = 5.0) -> None:
        self.address, self.interval_s = address.rstrip("/"), interval_s
        self.ended = threading.Event()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.local_rank == 0 and stage in ("fit", "test"):
            self.ended = threading.Event()  # the thread of a stage before may still be asking
            threading.Thread(target=self._poll, args=(trainer, self.ended), name="spot-notice", daemon=True).start()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.ended.set()

    def _poll(self, trainer: pl.Trainer, ended: threading.Event) -> None:
        notice, has_complained = "", False
        while not notice:
            try:
                token = self._ask("api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
                notice = self._ask("meta-data/spot/instance-action", **{"X-aws-ec2-metadata-token": token})
            except (OSError, ValueError, http.client.HTTPException) as error:
                is_none = isinstance(error, urllib.error.HTTPError) and error.code == 404
                if not is_none and not has_complained:
                    log.info(f"No answer about spot notices ({error}); asking again every {self.interval_s:.0f} s.")
                    has_complained = True
            if not notice and ended.wait(self.interval_s):
                return
        log.info(f"Spot notice: {notice.strip()}")
        for callback in trainer.callbacks:
            if isinstance(callback, Interruption):
                callback.ask("spot notice")
            if hasattr(callback, "expect_end"):
                callback.expect_end(SECONDS_LEFT)

    def _ask(self, path: str, method: str = "GET", **headers: str) -> str:
        request = urllib.request.Request(f"{self.address}/latest/{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        with opener.open(request, timeout=2.0) as answer:
            return str(answer.read(4096).decode())

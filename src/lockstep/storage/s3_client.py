"""The boto3 client of one bucket. Credentials come from boto3's own chain alone (environment, profile, role)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3_errors import translated
from lockstep.storage.s3_options import S3Options

PARALLEL_PARTS = 4


class S3Requests:
    """Requests to one bucket; every error is a StoreError.

    Args:
        client: boto3's, or anything with its methods.
    """

    def __init__(self, options: S3Options, client: Any = None) -> None:
        self.options = options
        self.client = client if client is not None else make_client(options)

    def call(self, method: str, **arguments: Any) -> Any:
        """The answer of boto3's method, e.g. `put_object`. A body must be bytes: it may be sent twice."""
        try:
            return self._called(method, arguments)
        except StoreError as error:
            if error.kind != "expired":
                raise
        self.client = make_client(self.options)  # boto3 reads keys from a file once: they may be new ones by now
        return self._called(method, arguments)

    def _called(self, method: str, arguments: dict[str, Any]) -> Any:
        with self.translated():
            return getattr(self.client, method)(Bucket=self.options.bucket, **arguments)

    @contextmanager
    def translated(self) -> Iterator[None]:
        with translated(self.options.bucket, self.options.endpoint_url):
            yield


def make_client(options: S3Options) -> Any:
    """A boto3 client; thread-safe. Its own log, which can quote signed requests, stays off whatever the root's level.

    Raises:
        UserError: boto3's configuration on this machine cannot be read.
    """
    import boto3
    from botocore.config import Config

    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
    logging.getLogger("botocore.credentials").setLevel(logging.CRITICAL)  # tracebacks of what we say in a sentence
    config = Config(
        signature_version="s3v4",  # also of signed links: boto3 would sign them in a way that newer buckets refuse
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=PARALLEL_PARTS + 4,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Each body's sha256 is sent as a signed header: signing the body too would hash it a second time
        s3={"payload_signing_enabled": False},
    )
    try:
        with translated(options.bucket, options.endpoint_url):
            return boto3.session.Session().client("s3", endpoint_url=options.endpoint_url, config=config)
    except StoreError as error:
        raise UserError(f"{options.uri} cannot be used: {error}.") from None

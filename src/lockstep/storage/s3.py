"""A place in an S3 bucket, through boto3's client and its transfer manager.

boto3's own configuration applies: profiles, AWS_ENDPOINT_URL(_S3), regions, addressing style,
credential processes, AWS_MAX_ATTEMPTS, AWS_REQUEST_CHECKSUM_CALCULATION. boto3 is imported when a
client is first needed.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError
from lockstep.storage.errors import S3Error, translate_errors

log = logging.getLogger(__name__)

URI = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9](/[^/\x00-\x1f\x7f?#\\]+)*/?")
ENDPOINT = re.compile(r"https?://[^\s@?]+")
# Larger files are sent in parts of this size, four at once.
PART_BYTES = 16 * 2**20
LOG_INTERVAL_S = 10.0
# The logs of these can quote signed requests.
VERBOSE_LOGGERS = ("boto3", "botocore", "s3transfer", "urllib3")
# It is called with a number of bytes that were transferred.
OnBytes = Callable[[int], None]


def is_s3(address: str | Path) -> bool:
    return str(address).startswith("s3:")


@dataclass(frozen=True)
class Bucket:
    """A bucket and a prefix in it. Keys are relative to `uri`; every method raises S3Error.

    Args:
        uri: s3://bucket/prefix; the prefix may be empty.
        endpoint_url: the address of a store other than Amazon's; None: by boto3's configuration.
    """

    uri: str
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        if not URI.fullmatch(str(self.uri)):
            raise UserError(
                "An S3 address is s3://bucket/prefix, without credentials, query, \\ or "
                "empty parts."
            )
        if {".", ".."} & set(self.uri.split("/")):
            raise UserError(f"{self.prefix!r} cannot begin a key of S3: it has '.' or '..' in it.")
        if self.endpoint_url and not ENDPOINT.fullmatch(self.endpoint_url):
            raise UserError(
                "s3.endpoint_url is http(s)://host:port, without credentials or a query."
            )

    @classmethod
    def from_config(cls, s3: Mapping[str, Any], uri: str | None = None) -> "Bucket":
        """Return the bucket of the config's node `s3`, at `uri` if it is given."""
        return cls(uri or s3["uri"], s3.get("endpoint_url"))

    def joinpath(self, name: str) -> "Bucket":
        """Return the place s3://bucket/prefix/name."""
        return replace(self, uri=self.address(name))

    @property
    def name(self) -> str:
        return self.uri.split("/")[2]

    @property
    def prefix(self) -> str:
        """The prefix of the keys in the bucket: empty, or ends with a slash."""
        key = self.uri.partition(self.name)[2].strip("/")
        return f"{key}/" if key else ""

    def address(self, key: str) -> str:
        return f"s3://{self.name}/{self.prefix}{key}"

    @cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        for name in VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        # storage/errors.py says in sentences what this one logs as tracebacks.
        logging.getLogger("botocore.credentials").setLevel(logging.CRITICAL)
        config = Config(connect_timeout=10, read_timeout=30, max_pool_connections=32)
        session = boto3.session.Session()
        return session.client("s3", endpoint_url=self.endpoint_url, config=config)

    def call(self, method: str, key: str | None = None, **arguments: Any) -> Any:
        """Return the answer of a method of boto3's client, such as `put_object`."""
        if key is not None:
            arguments["Key"] = self.prefix + key
        with translate_errors(self):
            return getattr(self.client, method)(Bucket=self.name, **arguments)

    def read(self, key: str) -> tuple[bytes | None, str | None]:
        """Return (content, ETag) of a small object; (None, None) if there is none."""
        try:
            with translate_errors(self):
                answer = self.call("get_object", key)
                return answer["Body"].read(), answer["ETag"]
        except S3Error as error:
            if error.code != "NoSuchKey":
                raise
            return None, None

    def write(self, key: str, data: bytes, **arguments: str) -> str:
        """Write a small object and return its ETag.

        Args:
            arguments: other arguments of put_object, such as IfMatch and IfNoneMatch.
        """
        return str(self.call("put_object", key, Body=data, **arguments)["ETag"])

    def upload(
        self, key: str, path: Path, sha256: str = "", progress: OnBytes | None = None
    ) -> None:
        """Upload a file in parallel parts, with retries, verified by checksums.

        Args:
            sha256: kept as metadata of the object.
            progress: called with a number of bytes; its exception ends the upload.
        """
        from boto3.s3.transfer import TransferConfig

        with translate_errors(self):
            extra: dict[str, Any] = {}
            if sha256:
                extra["Metadata"] = {"sha256": sha256}
            # The user of an older store sets when_required, and no checksum is sent.
            if self.client.meta.config.request_checksum_calculation != "when_required":
                extra["ChecksumAlgorithm"] = "CRC32"
            config = TransferConfig(PART_BYTES, max_concurrency=4, multipart_chunksize=PART_BYTES)
            object_key = self.prefix + key
            self.client.upload_file(str(path), self.name, object_key, extra, progress, config)

    def download(self, key: str, path: Path, progress: OnBytes | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with translate_errors(self):
            self.client.download_file(self.name, self.prefix + key, str(path), Callback=progress)

    def list(self, key_prefix: str = "") -> Iterator[tuple[str, int, str]]:
        """Yield (key, bytes, ETag) of every object whose key begins so, in the order of keys."""
        with translate_errors(self):
            paginator = self.client.get_paginator("list_objects_v2")
            for page in paginator.paginate(Bucket=self.name, Prefix=self.prefix + key_prefix):
                for entry in page.get("Contents", []):
                    key = entry["Key"].removeprefix(self.prefix)
                    yield key, entry["Size"], entry["ETag"].strip('"')

    def check_writable(self) -> None:
        """Write and delete a small object."""
        key = f"write-test-{time.time_ns():x}"
        self.write(key, b"1")
        self.call("delete_object", key)

    def web_url(self, key: str) -> str:
        """Return the address under which a browser finds an object that all may read.

        It has the addressing style of boto3's configuration.
        """
        place = {"Bucket": self.name, "Key": self.prefix + key}
        return str(self.client.generate_presigned_url("get_object", place)).partition("?")[0]


class TransferProgress:
    """Count transferred bytes, and log every ten seconds how long the rest takes.

    Args:
        action: the first words of the line, such as "copying s3://bucket/photos".
        total: bytes.
    """

    def __init__(self, action: str, total: int) -> None:
        self.action = action
        self.total = total
        self.done = 0
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._log_at = self._started_at + LOG_INTERVAL_S

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            now = time.monotonic()
            if now < self._log_at:
                return
            self._log_at = now + LOG_INTERVAL_S
        rate = max(self.done / (now - self._started_at), 1.0)
        remaining_s = (self.total - self.done) / rate
        log.info(
            f"{self.action}: {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, "
            f"{rate / 1e6:,.1f} MB/s, about {remaining_s:,.0f} s left"
        )

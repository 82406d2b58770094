"""Where a bucket is and how objects are kept there: s3:// addresses and the options of the config group s3."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from lockstep.runs.errors import UserError
from lockstep.storage.object_store import checked_key

BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
# Of the group s3, what says when to upload, not where: arguments of callbacks/s3_upload.py
UPLOAD_OPTIONS = {"required", "flush_timeout_s", "last_interval_s", "files_interval_s"}


@dataclass(frozen=True)
class S3Options:
    """Where objects go and how they are kept; holds no credentials, so it may be printed.

    Args:
        uri: s3://bucket/prefix; the prefix may be empty.
        endpoint_url: of a store that speaks S3; None for Amazon's.
        storage_class: as S3 names it, e.g. STANDARD_IA.
        server_side_encryption: AES256 or aws:kms.
    Raises:
        UserError: an address that is none, or that carries credentials (it is not repeated in the message).
    """

    uri: str
    endpoint_url: str | None = None
    storage_class: str | None = None
    server_side_encryption: str | None = None
    sse_kms_key_id: str | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        parse_uri(self.uri)
        if self.endpoint_url is not None:
            _check_endpoint(str(self.endpoint_url))
        if self.server_side_encryption not in (None, "AES256", "aws:kms", "aws:kms:dsse"):
            raise UserError("s3.server_side_encryption is AES256, aws:kms or null.")
        if self.sse_kms_key_id and not str(self.server_side_encryption).startswith("aws:kms"):
            raise UserError("s3.sse_kms_key_id needs s3.server_side_encryption=aws:kms.")

    @property
    def bucket(self) -> str:
        return parse_uri(self.uri)[0]

    @property
    def prefix(self) -> str:
        return parse_uri(self.uri)[1].rstrip("/")

    def encryption(self) -> dict[str, str]:
        chosen = {"ServerSideEncryption": self.server_side_encryption, "SSEKMSKeyId": self.sse_kms_key_id}
        return {name: value for name, value in chosen.items() if value}

    def put_arguments(self) -> dict[str, str]:
        storage_class = {"StorageClass": self.storage_class} if self.storage_class else {}
        return {**self.encryption(), **storage_class}


def options_from(s3: Mapping[str, Any], uri: str | None = None) -> S3Options:
    """S3Options out of the config group s3; `uri` in place of its own.

    Raises:
        UserError: an unknown option; credentials have no place in a config, which is written to files.
    """
    names = {field.name for field in fields(S3Options)}
    for name in s3.keys() - names - UPLOAD_OPTIONS:
        raise UserError(f"s3.{name} is no option; credentials are found by boto3 itself (environment, profile, role).")
    given = {name: value for name, value in s3.items() if name in names and value is not None}
    return S3Options(**{**given, **({"uri": uri} if uri else {})})


def parse_uri(uri: str) -> tuple[str, str]:
    """("bucket", "key/or/prefix") of s3://bucket/key/or/prefix.

    Raises:
        UserError: it is no such address.
    """
    text = str(uri)
    if not text.startswith("s3://"):
        raise UserError("An S3 address is s3://bucket/prefix; a (presigned) web address or a path is none.")
    bucket, _, key = text.removeprefix("s3://").partition("/")
    if "@" in bucket or "?" in text:
        raise UserError("An S3 address is s3://bucket/prefix without credentials or a query: boto3 finds the keys.")
    if not BUCKET_NAME.fullmatch(bucket):
        raise UserError(f"{bucket!r} cannot name a bucket: an S3 address is s3://bucket/prefix.")
    return bucket, checked_key(key)


def _check_endpoint(endpoint_url: str) -> None:
    try:
        parts = urlsplit(endpoint_url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        raise UserError("s3.endpoint_url is no web address: http(s)://host:port.") from None
    if parts.username or parts.password or parts.query:
        raise UserError("s3.endpoint_url holds credentials or a query; give http(s)://host:port, boto3 finds the keys.")
    if not good:
        raise UserError(f"s3.endpoint_url={endpoint_url!r} is no web address: http(s)://host:port.")

"""Where a bucket is and how it is reached: s3:// addresses, the boto3 client, and a sentence for each S3 error.

Credentials come from boto3's own chain alone (environment, profile, instance role). Nothing here repeats a message
of botocore or of the store, because those can quote requests: what a user sees is written in SENTENCES.
"""

import contextlib
import errno
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from lockstep.runs.errors import UserError

BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
KEY = re.compile(r"[^\x00-\x1f\x7f?#\\]*")
PARALLEL_PARTS = 4
# Of the group s3, what says when to upload, not where: arguments of callbacks/s3_upload.py
UPLOAD_OPTIONS = {"required", "flush_timeout_s", "last_interval_s", "files_interval_s"}

# kind: what the caller can do about it. "refused" and "missing_bucket" need the user; "busy" and "unreachable" pass.
SENTENCES: dict[str, tuple[str, str]] = {
    "NoSuchBucket": ("missing_bucket", "the bucket {bucket} does not exist{at}: create it, or correct s3.uri"),
    "InvalidBucketName": ("missing_bucket", "{bucket} cannot name a bucket: correct s3.uri"),
    "InvalidAccessKeyId": ("refused", "the access key id is not known{at}: correct AWS_ACCESS_KEY_ID or the profile"),
    "SignatureDoesNotMatch": ("refused", "the secret key does not fit the access key id{at}: correct the credentials"),
    "RequestTimeTooSkewed": ("refused", "this machine's clock differs too much from the store's{at}: set the clock"),
    "RequestExpired": ("refused", "this machine's clock differs too much from the store's{at}: set the clock"),
    "ExpiredToken": ("refused", "the temporary credentials have expired: renew them"),
    "InvalidToken": ("refused", "the session token is not valid: renew the temporary credentials"),
    "AccessDenied": (
        "refused",
        "access denied to bucket {bucket}{at}: they need put, get, list, delete, "
        "and with a KMS key kms:GenerateDataKey and kms:Decrypt",
    ),
    "AllAccessDisabled": ("refused", "all access to bucket {bucket} is switched off{at}"),
    "AuthorizationHeaderMalformed": ("refused", "bucket {bucket} lies in another region: set AWS_DEFAULT_REGION to it"),
    "PermanentRedirect": ("refused", "bucket {bucket} lies in another region: set AWS_DEFAULT_REGION to it"),
    "KMS.NotFoundException": ("refused", "the key of s3.sse_kms_key_id does not exist: correct it"),
    "InvalidStorageClass": ("refused", "the store does not know this s3.storage_class: correct it, or leave it null"),
    "InvalidEncryptionAlgorithmError": ("refused", "the store does not know this s3.server_side_encryption"),
    "QuotaExceeded": ("full", "bucket {bucket} is full{at}: free space or raise its quota"),
    "XMinioStorageFull": ("full", "the store is full{at}: free space there"),
    "InsufficientStorage": ("full", "the store is full{at}: free space there"),
    "EntityTooLarge": ("full", "the store refuses an object of this size{at}"),
    "BadDigest": ("corrupt", "the bytes did not arrive as they were sent{at}"),
    "XAmzContentSHA256Mismatch": ("corrupt", "the bytes did not arrive as they were sent{at}"),
    "PreconditionFailed": ("conflict", "another process wrote the object in the meantime"),
    "ConditionalRequestConflict": ("conflict", "another process wrote the object in the meantime"),
    "NoSuchUpload": ("aborted", "the unfinished upload was swept away by a newer start of this run"),
    "NoSuchKey": ("missing", "there is no such object in bucket {bucket}{at}"),
    "SlowDown": ("busy", "the store is too busy{at}"),
    "ServiceUnavailable": ("busy", "the store is too busy{at}"),
}
BY_STATUS = {
    400: "refused", 401: "AccessDenied", 403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict",
    412: "PreconditionFailed", 416: "conflict", 503: "ServiceUnavailable", 507: "InsufficientStorage",
}  # fmt: skip


class StoreError(Exception):
    """What went wrong with the store, in one sentence without secrets.

    kind: unreachable | busy | full | refused | missing_bucket | missing | conflict | corrupt | aborted | local.
    """

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


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


def checked_key(key: str) -> str:
    """The same key, or UserError where it could mean another place than it says."""
    parts = key.rstrip("/").split("/")
    if not KEY.fullmatch(key) or (key and any(part in ("", ".", "..") for part in parts)):
        raise UserError(f"{key!r} cannot be a key: no empty, '.' or '..' parts, no control characters, no ?, # or \\.")
    return key


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
    config = Config(
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
        with translated(options):
            return boto3.session.Session().client("s3", endpoint_url=options.endpoint_url, config=config)
    except StoreError as error:
        raise UserError(f"{options.uri} cannot be used: {error}.") from None


@contextlib.contextmanager
def translated(options: S3Options) -> Iterator[None]:
    """Turns every error of boto3 and the network into a StoreError; the original is dropped, it may quote keys."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    at = f" at {options.endpoint_url}" if options.endpoint_url else ""
    try:
        yield
    except ClientError as error:
        raise _from_answer(error.response, options.bucket, at) from None
    except (BotoCoreError, HTTPClientError, Boto3Error) as error:
        raise _from_library(type(error).__name__, at) from None
    except (ConnectionError, TimeoutError) as error:
        raise StoreError("unreachable", f"the connection to the store{at} broke ({type(error).__name__})") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError("local", "this machine's disk is full: free space on it") from None
        raise StoreError("local", f"a file on this machine cannot be used ({error.strerror})") from None
    except ValueError as error:
        raise StoreError("refused", f"boto3 does not accept the settings ({type(error).__name__})") from None


def _from_answer(response: dict[str, Any], bucket: str, at: str) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    known = SENTENCES.get(code) or SENTENCES.get(str(BY_STATUS.get(status)))
    if known:
        return StoreError(known[0], known[1].format(bucket=bucket, at=at))
    shown = code if re.fullmatch(r"[A-Za-z0-9.]{1,60}", code) else "no code"
    if status >= 500:
        return StoreError("busy", f"the store{at} failed (HTTP {status}, {shown}); it or the bucket may be full")
    return StoreError("refused", f"the store{at} refused the request (HTTP {status}, {shown})")


def _from_library(name: str, at: str) -> StoreError:
    credentials = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
    sentences = {
        "NoCredentialsError": ("refused", credentials),
        "PartialCredentialsError": ("refused", "the credentials are incomplete: key id and secret are both needed"),
        "ProfileNotFound": ("refused", "the profile of AWS_PROFILE is not in the AWS configuration: correct it"),
        "ConfigParseError": ("refused", "the AWS configuration file cannot be read: correct it"),
        "CredentialRetrievalError": ("refused", "the credentials could not be fetched from where the profile says"),
        "NoRegionError": ("refused", "no region is known: set AWS_DEFAULT_REGION"),
        "ParamValidationError": ("refused", "boto3 does not accept the name of the bucket or object"),
        "SSLError": ("unreachable", f"the store's certificate{at} cannot be verified: check s3.endpoint_url"),
        "EndpointConnectionError": ("unreachable", f"the store{at} cannot be reached: check network and endpoint_url"),
        "ConnectTimeoutError": ("unreachable", f"the store{at} does not answer: check network and s3.endpoint_url"),
    }
    if name in sentences:
        return StoreError(*sentences[name])
    if "Token" in name or "SSO" in name:
        return StoreError("refused", "the sign-in has expired: sign in again")
    return StoreError("unreachable", f"the connection to the store{at} broke ({name})")

"""A sentence for each thing that can go wrong between boto3 and an S3 store.

Nothing here repeats a message of botocore or of the store, because those can quote requests: what a user sees is
written in SENTENCES.
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.storage.object_store import StoreError

# kind: what the caller can do about it (object_store.py).
SENTENCES: dict[str, tuple[str, str]] = {
    "NoSuchBucket": ("missing_bucket", "the bucket {bucket} does not exist{at}: create it, or correct s3.uri"),
    "InvalidBucketName": ("missing_bucket", "{bucket} cannot name a bucket: correct s3.uri"),
    "InvalidAccessKeyId": ("refused", "the access key id is not known{at}: correct AWS_ACCESS_KEY_ID or the profile"),
    "SignatureDoesNotMatch": ("refused", "the secret key does not fit the access key id{at}: correct the credentials"),
    "RequestTimeTooSkewed": ("refused", "this machine's clock differs too much from the store's{at}: set the clock"),
    "RequestExpired": ("refused", "this machine's clock differs too much from the store's{at}: set the clock"),
    "ExpiredToken": ("expired", "the temporary credentials have expired: renew them"),
    "InvalidToken": ("refused", "the session token is not valid: renew the temporary credentials"),
    "AccessDenied": (
        "refused",
        "access denied to bucket {bucket}{at}: to read data takes get and list, to keep checkpoints put and delete "
        "too, and with a KMS key kms:GenerateDataKey and kms:Decrypt",
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


@contextlib.contextmanager
def translated(bucket: str, endpoint_url: str | None = None) -> Iterator[None]:
    """Turns every error of boto3 and the network into a StoreError; the original is dropped, it may quote keys."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    at = f" at {endpoint_url}" if endpoint_url else ""
    try:
        yield
    except ClientError as error:
        raise _from_answer(error.response, bucket, at) from None
    except (BotoCoreError, HTTPClientError, Boto3Error) as error:
        raise _from_library(type(error).__name__, at) from None
    except RuntimeError as error:
        if "Credentials were refreshed" not in str(error):  # and are expired still: botocore has no class for it
            raise
        raise StoreError(*SENTENCES["ExpiredToken"]) from None
    except (ConnectionError, TimeoutError) as error:
        raise StoreError("unreachable", f"the connection to the store{at} broke ({type(error).__name__})") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError("local", "this machine's disk is full: free space on it") from None
        raise StoreError("local", f"a file on this machine cannot be used ({error.strerror})") from None
    except ValueError as error:
        raise StoreError("refused", f"boto3 does not accept the settings ({type(error).__name__})") from None


def _from_answer(response: Mapping[str, Any], bucket: str, at: str) -> StoreError:
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

"""One sentence for each thing that can go wrong between boto3 and a store.

No message of botocore or of the store is repeated: they can quote requests and their signatures.
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Any

from lockstep.process.errors import UserError

# A key is the code of S3's answer or the class of botocore's exception.
SENTENCES = {
    "NoSuchBucket": "the bucket {bucket} does not exist{place}: create it, or correct the address",
    "NoSuchKey": "there is no such object in bucket {bucket}{place}",
    "InvalidAccessKeyId": "the access key id is not known{place}: correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key does not fit the access key id{place}: correct it",
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's{place}: set it",
    "ExpiredToken": "the temporary credentials have expired: renew them",
    "AccessDenied": "access to bucket {bucket} is denied{place}: reading needs s3:GetObject and "
    "s3:ListBucket, a run needs s3:PutObject and s3:DeleteObject too, and a KMS key "
    "kms:GenerateDataKey and kms:Decrypt",
    "PermanentRedirect": "bucket {bucket} is in another region: set AWS_DEFAULT_REGION to it",
    "QuotaExceeded": "bucket {bucket} or its store is full{place}: free space or raise its quota",
    "PreconditionFailed": "another process wrote the object in the meantime",
    "SlowDown": "the store is too busy{place}",
    "NoCredentialsError": "no credentials were found: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give a role",
    "ProfileNotFound": "the profile of AWS_PROFILE is not in the AWS configuration: correct it",
    "EndpointConnectionError": "the store{place} cannot be reached: check network and endpoint",
}
CODE_ALIASES = {
    "RequestExpired": "RequestTimeTooSkewed",
    "AuthorizationHeaderMalformed": "PermanentRedirect",
    "PartialCredentialsError": "NoCredentialsError",
    "ConnectTimeoutError": "EndpointConnectionError",
}
CODE_BY_STATUS = {
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "PreconditionFailed",
    412: "PreconditionFailed",
    416: "PreconditionFailed",
    503: "SlowDown",
    507: "QuotaExceeded",
}


class S3Error(UserError):
    """An error of a bucket, with S3's code, such as NoSuchKey, or the class of the exception."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code


class OtherRunError(UserError):
    """The place of a run in a bucket holds another run of the same id."""


@contextlib.contextmanager
def translate_errors(bucket: Any) -> Iterator[None]:
    """Raise an S3Error for every error of boto3 and the network in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = f" at {bucket.endpoint_url}" if bucket.endpoint_url else ""
        s3_error = to_s3_error(error, bucket.name, place)
        if s3_error is None:
            raise
        raise s3_error from None


def to_s3_error(error: BaseException, bucket: str, place: str) -> S3Error | None:
    """Return the S3Error for an error; None for one that has nothing to do with S3.

    Args:
        bucket: the name of the bucket.
        place: " at https://store", or empty for Amazon's.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError

    # S3UploadFailedError hides the answer of the store.
    if isinstance(error, Boto3Error) and error.__context__:
        error = error.__context__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return None
    code, status = _code_and_status(error)
    if code in SENTENCES:
        return S3Error(SENTENCES[code].format(bucket=bucket, place=place), code)

    safe_code = code if re.fullmatch(r"[A-Za-z0-9.]{1,60}", code) else "no code"
    if status:
        hint = "; it or the bucket may be full" if status >= 500 else ""
        return S3Error(
            f"the store{place} refused the request (HTTP {status}, {safe_code}){hint}", code
        )
    if isinstance(error, BotoCoreError | Boto3Error | ConnectionError | TimeoutError | ValueError):
        advice = "check network, endpoint and AWS configuration"
        return S3Error(f"the store{place} failed ({safe_code}): {advice}", code)
    return None


def _code_and_status(error: BaseException) -> tuple[str, int]:
    """Return the error's key of SENTENCES, such as NoSuchKey, and the HTTP status or 0."""
    from botocore.exceptions import ClientError

    code = type(error).__name__
    status = 0
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code not in SENTENCES.keys() | CODE_ALIASES.keys():
            code = CODE_BY_STATUS.get(status, code)
    # There are many codes for expired credentials.
    if re.search("Token|SSO", code) or "Credentials were refreshed" in str(error):
        code = "ExpiredToken"
    return CODE_ALIASES.get(code, code), status

"""One sentence for each thing that can go wrong between boto3 and a store, with what to do about it.

No message of botocore or of the store is repeated, because those can quote requests and their signatures.
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.runs.errors import UserError

CREDENTIALS = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give a role"
CLOCK = "the clock of this machine differs too much from the store's{at}: set the clock"
REGION = "bucket {bucket} lies in another region: set AWS_DEFAULT_REGION to it"
SENTENCES = {  # by the code that S3 answers
    "NoSuchBucket": "the bucket {bucket} does not exist{at}: create it, or correct the s3:// address",
    "InvalidBucketName": "{bucket} cannot name a bucket: correct the s3:// address",
    "NoSuchKey": "there is no such object in bucket {bucket}{at}",
    "InvalidAccessKeyId": "the access key id is not known{at}: correct AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "the secret key does not fit the access key id{at}: correct the credentials",
    "RequestTimeTooSkewed": CLOCK,
    "RequestExpired": CLOCK,
    "ExpiredToken": "the temporary credentials have expired: renew them",
    "InvalidToken": "the session token is not valid: renew the temporary credentials",
    "AccessDenied": "access to bucket {bucket} is denied{at}: reading needs s3:GetObject and s3:ListBucket, "
    "a run needs s3:PutObject and s3:DeleteObject too, and a KMS key kms:GenerateDataKey and kms:Decrypt",
    "AuthorizationHeaderMalformed": REGION,
    "PermanentRedirect": REGION,
    "KMS.NotFoundException": "the key of s3.sse_kms_key_id does not exist: correct it",
    "InvalidStorageClass": "the store does not know this s3.storage_class: correct it, or leave it null",
    "InvalidEncryptionAlgorithmError": "the store does not know this s3.server_side_encryption: correct it",
    "QuotaExceeded": "bucket {bucket} is full{at}: free space or raise its quota",
    "InsufficientStorage": "the store is full{at}: free space there",
    "EntityTooLarge": "the store refuses an object of this size{at}",
    "BadDigest": "the bytes did not arrive as they were sent{at}",
    "PreconditionFailed": "another process wrote the object in the meantime",
    "SlowDown": "the store is too busy{at}",
}
BY_STATUS = {401: "AccessDenied", 403: "AccessDenied", 404: "NoSuchKey", 409: "PreconditionFailed",
             412: "PreconditionFailed", 416: "PreconditionFailed", 503: "SlowDown",
             507: "InsufficientStorage"}  # fmt: skip
LOCAL = {  # by the class of botocore's exception
    "NoCredentialsError": CREDENTIALS,
    "PartialCredentialsError": "the credentials are incomplete: both the key id and the secret are needed",
    "ProfileNotFound": "the profile of AWS_PROFILE is not in the AWS configuration: correct it",
    "ConfigParseError": "the AWS configuration file cannot be read: correct it",
    "CredentialRetrievalError": "the credentials could not be fetched from where the profile says",
    "NoRegionError": "no region is known: set AWS_DEFAULT_REGION",
    "ParamValidationError": "boto3 does not accept the name of the bucket or object",
    "SSLError": "the certificate of the store{at} cannot be verified: check the endpoint",
    "EndpointConnectionError": "the store{at} cannot be reached: check the network and the endpoint",
    "ConnectTimeoutError": "the store{at} does not answer: check the network and the endpoint",
}


class S3Error(UserError):
    """What went wrong with a bucket.

    Attributes:
        code: as S3 names it, such as NoSuchKey and PreconditionFailed; the class of the exception if S3 did not answer.
    """

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code


@contextlib.contextmanager
def translated(bucket: str, endpoint_url: str | None = None) -> Iterator[None]:
    """Raise an S3Error for every error of boto3 and the network in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if translation := translate(error, bucket, f" at {endpoint_url}" if endpoint_url else ""):
            raise translation from None
        raise


def translate(error: BaseException, bucket: str, at: str) -> S3Error | None:
    """Return None for an error that has nothing to do with S3."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    if isinstance(error, Boto3Error) and error.__context__:  # S3UploadFailedError hides the answer of the store
        error = error.__context__
    name = type(error).__name__
    if isinstance(error, ClientError):
        return _of_answer(error.response, bucket, at)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return None
    if name in LOCAL:
        return S3Error(LOCAL[name].format(at=at), name)
    if "Token" in name or "SSO" in name:
        return S3Error("the sign-in has expired: sign in again", name)
    if isinstance(error, RuntimeError) and "Credentials were refreshed" in str(error):  # botocore has no class for it
        return S3Error(SENTENCES["ExpiredToken"], "ExpiredToken")
    if isinstance(error, BotoCoreError | HTTPClientError | Boto3Error | ConnectionError | TimeoutError):
        return S3Error(f"the connection to the store{at} broke ({name})", name)
    if isinstance(error, ValueError):
        return S3Error(f"boto3 does not accept the settings ({name}): check the endpoint", name)
    return None


def _of_answer(response: Mapping[str, Any], bucket: str, at: str) -> S3Error:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code not in SENTENCES and status in BY_STATUS:
        code = BY_STATUS[status]
    if code in SENTENCES:
        return S3Error(SENTENCES[code].format(bucket=bucket, at=at), code)
    shown = code if re.fullmatch(r"[A-Za-z0-9.]{1,60}", code) else "no code"
    full = "; it or the bucket may be full" if status >= 500 else ""
    return S3Error(f"the store{at} refused the request (HTTP {status}, {shown}){full}", code)

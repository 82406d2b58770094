"""The client, and the one sentence for each thing that can be wrong; against a real S3 server."""

import datetime
import logging
import socket

import pytest

from lockstep.runs.errors import UserError
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_client import make_client
from lockstep.storage.s3_errors import translated
from lockstep.storage.s3_options import S3Options
from object_store import KEY_IDS, SECRETS, shared_store


@pytest.fixture
def store(monkeypatch):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


def failure(store, bucket_name, **changes) -> StoreError:
    """What probing the bucket says."""
    options = S3Options(f"s3://{bucket_name}", changes.pop("endpoint_url", store.endpoint_url), **changes)
    with pytest.raises(StoreError) as caught:
        S3Store(options).probe("runs/")
    error = caught.value
    assert error.__suppress_context__, "the original error, which may quote the request, stays out of the traceback"
    assert not any(secret in str(error) for secret in SECRETS + KEY_IDS)
    return error


def test_a_good_bucket_is_probed_and_left_as_it_was(store, bucket_name):
    probed = S3Store(S3Options(f"s3://{bucket_name}/p", store.endpoint_url))
    assert probed.probe("p/") is True
    assert list(probed.list("")) == []


def test_missing_bucket(store):
    error = failure(store, "no-such-bucket")
    assert error.kind == "missing_bucket"
    assert f"the bucket no-such-bucket does not exist at {store.endpoint_url}: create it" in str(error)


def test_wrong_secret(store, bucket_name, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    error = failure(store, bucket_name)
    assert (error.kind, "the secret key does not fit" in str(error)) == ("refused", True)


def test_wrong_key_id(store, bucket_name, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    error = failure(store, bucket_name)
    assert (error.kind, "the access key id is not known" in str(error)) == ("refused", True)


def test_no_credentials(store, bucket_name, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = failure(store, bucket_name)
    assert (error.kind, "no credentials were found" in str(error)) == ("refused", True)


def test_read_only_identity(store, bucket_name, monkeypatch):
    for name, value in store.environment("ro").items():
        monkeypatch.setenv(name, value)
    error = failure(store, bucket_name)
    assert (error.kind, f"access denied to bucket {bucket_name}" in str(error)) == ("refused", True)


def test_clock_skew(store, bucket_name, monkeypatch):
    import botocore.auth
    import botocore.compat

    ahead = botocore.compat.get_current_datetime() + datetime.timedelta(hours=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: ahead)
    error = failure(store, bucket_name)
    assert (error.kind, "clock differs too much" in str(error)) == ("refused", True)


def test_nobody_listens(store, bucket_name):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    error = failure(store, bucket_name, endpoint_url=f"http://127.0.0.1:{port}", connect_timeout_s=1.0)
    assert (error.kind, "cannot be reached" in str(error)) == ("unreachable", True)


@pytest.mark.slow
def test_somebody_listens_and_says_nothing(store, bucket_name):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = failure(store, bucket_name, endpoint_url=endpoint, read_timeout_s=0.3)
    assert error.kind == "unreachable"


def test_unknown_profile(store, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match="the profile of AWS_PROFILE"):
        make_client(S3Options("s3://bucket", store.endpoint_url))


def test_the_libraries_debug_log_stays_off(store, bucket_name, caplog):
    """hydra.verbose=true sets the root to DEBUG; botocore would then print every signed request."""
    with caplog.at_level(logging.DEBUG):
        S3Store(S3Options(f"s3://{bucket_name}", store.endpoint_url)).put("a", b"x")
    assert not any(word in caplog.text for word in (*SECRETS, *KEY_IDS, "Signature", "Authorization"))


ANSWERS = [
    (403, "QuotaExceeded", "full", "bucket runs is full"),
    (507, "XMinioStorageFull", "full", "the store is full"),
    (507, "", "full", "the store is full"),
    (503, "SlowDown", "busy", "too busy"),
    (400, "ExpiredToken", "expired", "renew"),
    (301, "PermanentRedirect", "refused", "another region"),
    (500, "Internal<Error>", "busy", "HTTP 500, no code"),
    (418, "Teapot", "refused", "HTTP 418, Teapot"),
]


@pytest.mark.parametrize(("status", "code", "kind", "words"), ANSWERS)
def test_what_other_stores_answer(status, code, kind, words):
    from botocore.exceptions import ClientError

    answer = {
        "Error": {"Code": code, "Message": f"key {SECRETS[0]}"}, "ResponseMetadata": {"HTTPStatusCode": status},
    }  # fmt: skip
    with pytest.raises(StoreError, match=words) as caught, translated("runs"):
        raise ClientError(answer, "PutObject")
    assert caught.value.kind == kind and SECRETS[0] not in str(caught.value)


def test_a_full_disk_on_this_machine():
    with pytest.raises(StoreError, match="this machine's disk is full"), translated("runs"):
        raise OSError(28, "No space left on device")

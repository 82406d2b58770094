"""Addresses, options, errors as sentences, credentials and keys, against a real S3 server."""

import os
import re
from types import SimpleNamespace

import pytest
from boto3.exceptions import S3UploadFailedError
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError

from lockstep.process.errors import UserError
from lockstep.storage.errors import S3Error, to_s3_error
from lockstep.storage.s3 import Bucket
from object_store import IDENTITIES, KEY_IDS, SECRETS, shared_store


@pytest.fixture
def server(monkeypatch):
    made = shared_store()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(scope="module")
def name():
    return shared_store().new_bucket()


def test_an_address_has_a_bucket_and_a_prefix():
    places = [Bucket(uri) for uri in ("s3://bucket/a/b/", "s3://bucket", "s3://s3x/s3x")]
    assert [(each.name, each.prefix) for each in places] == [
        ("bucket", "a/b/"),
        ("bucket", ""),
        ("s3x", "s3x/"),
    ]
    bucket = Bucket.from_config({"uri": "s3://bbb/p", "required": True, "endpoint_url": "http://h"})
    assert bucket == Bucket("s3://bbb/p", "http://h")
    assert (
        bucket.joinpath("x").address("y") == "s3://bbb/p/x/y"
        and Bucket("s3://bbb").address("y") == "s3://bbb/y"
    )


@pytest.mark.parametrize(
    "given",
    ["bucket/prefix", "https://host/b?X-Amz-Signature=5ecre7", "s3://k:5ecre7@bucket/x", "s3:///x", "s3://b_!/x",
     "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/a?X-Amz-Signature=5ecre7", "s3://bucket/a\nb",
     ("s3://bucket", "127.0.0.1:9000"), ("s3://bucket", "http://key:5ecre7@host"), ("s3://bucket", "http://h/?t=5ecre7")],
)  # fmt: skip
def test_a_wrong_address_is_refused_without_its_secret(given):
    with pytest.raises(UserError) as caught:
        Bucket(*([given] if isinstance(given, str) else given))
    assert "5ecre7" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "prä fix/ö+1=c&d (1)/100%"])
def test_keys_survive_writing_uploading_listing_and_reading(server, name, prefix, tmp_path):
    bucket = Bucket(f"s3://{name}/{prefix}".rstrip("/"), server.endpoint_url).joinpath("run")
    bucket.check_writable()  # and leaves nothing
    (tmp_path / "large").write_bytes(os.urandom(20 * 2**20))
    bucket.upload("checkpoints/ä +.ckpt", tmp_path / "large", sha256="ab")
    bucket.write("best.json", b"{}")
    assert [(key, size) for key, size, _ in bucket.list()] == [
        ("best.json", 2),
        ("checkpoints/ä +.ckpt", 20 * 2**20),
    ]
    bucket.download("checkpoints/ä +.ckpt", tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "large").read_bytes()
    assert bucket.call("head_object", "checkpoints/ä +.ckpt")["Metadata"] == {"sha256": "ab"}
    assert bucket.read("best.json")[0] == b"{}"
    bucket.call("delete_object", "best.json")
    assert bucket.read("best.json") == (None, None)


@pytest.mark.parametrize(
    ("uri", "changes", "says"),
    [
        ("", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "the secret key does not fit the access key id"),
        ("", {"AWS_ACCESS_KEY_ID": "NOBODY"}, "the access key id is not known"),
        (
            "",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "no credentials were found: set",
        ),
        (
            "",
            {"AWS_PROFILE": "nobody"},
            "the profile of AWS_PROFILE is not in the AWS configuration",
        ),
        (
            "",
            dict(
                zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), IDENTITIES["ro"], strict=False)
            ),
            "access to b",
        ),
        (
            "",
            {"endpoint_url": "http://127.0.0.1:9"},
            "the store at http://127.0.0.1:9 cannot be reached",
        ),
        (
            "s3://no-such-bucket",
            {},
            "the bucket no-such-bucket does not exist at http://127.0.0.1:[0-9]+: create it",
        ),
    ],
)
def test_a_bucket_that_cannot_be_used_is_a_sentence(server, name, uri, changes, says, monkeypatch):
    endpoint_url = changes.get("endpoint_url", server.endpoint_url)
    for variable, value in changes.items():
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable)
    with pytest.raises(S3Error) as caught:
        Bucket(uri or f"s3://{name}", endpoint_url).check_writable()
    assert re.match(says, str(caught.value))
    assert caught.value.__suppress_context__, (
        "the original error, which may quote the request, is not shown"
    )
    assert not any(secret in str(caught.value) for secret in SECRETS + KEY_IDS)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "QuotaExceeded", "runs or its store is full"), (507, "", "is full"), (503, "SlowDown", "too busy"),
        (400, "ExpiredToken", "renew them"), (301, "PermanentRedirect", "another region: set AWS_DEFAULT_REGION"),
        (500, "Internal<Error>", "HTTP 500, no code"), (418, "Teapot", "HTTP 418, Teapot"), (403, "Odd", "is denied"),
        (403, "RequestTimeTooSkewed", "the clock of this machine differs"),
    ],
)  # fmt: skip
def test_the_answers_of_other_stores_are_sentences(status, code, says):
    answer = {
        "Error": {"Code": code, "Message": f"key {SECRETS[0]}"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    wrapped = S3UploadFailedError("as upload_file raises it")
    wrapped.__context__ = ClientError(answer, "PutObject")
    for error in (wrapped, wrapped.__context__):
        assert says in str(to_s3_error(error, "runs", "")) and SECRETS[0] not in str(
            to_s3_error(error, "runs", "")
        )


@pytest.mark.parametrize(
    "style, address",
    [("virtual", "https://bin.s3.example.com/"), ("path", "https://s3.example.com/bin/")],
)
def test_requests_go_to_the_address_of_boto3s_addressing_style(
    style, address, tmp_path, monkeypatch
):
    (tmp_path / "config").write_text(f"[default]\ns3 =\n    addressing_style = {style}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    bucket, sent = Bucket("s3://bin/a b+ü", "https://s3.example.com"), []

    def answer(request, **_):
        sent.append(request.url)
        return AWSResponse(request.url, 200, {"ETag": "1"}, SimpleNamespace(stream=list))

    bucket.client.meta.events.register("before-send.s3", answer)
    bucket.write("x", b"1")
    assert sent == [address + "a%20b%2B%C3%BC/x"] and bucket.web_url("x") == sent[0]

"""s3:// addresses and the options of the config group s3."""

import pytest

from lockstep.runs.errors import UserError
from lockstep.storage.s3_options import S3Options, options_from, parse_uri


def test_parse_uri():
    assert parse_uri("s3://bucket/a/b") == ("bucket", "a/b")
    assert parse_uri("s3://bucket") == ("bucket", "")
    assert S3Options("s3://bucket/a/b/").prefix == "a/b"


@pytest.mark.parametrize(
    "uri",
    ["bucket/prefix", "https://host/b?X-Amz-Signature=5ecre7", "s3://k:5ecre7@bucket/x", "s3:///x", "s3://b_!/x",
     "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/a?X-Amz-Signature=5ecre7", "s3://bucket/a\nb"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_and_what_may_be_secret_is_not_repeated(uri):
    with pytest.raises(UserError) as caught:
        S3Options(uri)
    assert "5ecre7" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "ftp://host", "http://key:5ecre7@host", "http://host/?token=5ecre7",
                                 "http://host:port"])  # fmt: skip
def test_an_endpoint_that_is_none_is_refused(url):
    with pytest.raises(UserError, match=r"s3\.endpoint_url") as caught:
        S3Options("s3://bucket", url)
    assert "5ecre7" not in str(caught.value)


def test_options_from_the_config_group():
    group = {"uri": "s3://bbb/p", "endpoint_url": None, "required": True, "storage_class": "STANDARD_IA"}
    assert options_from(group) == S3Options("s3://bbb/p", storage_class="STANDARD_IA")
    assert options_from(group, uri="s3://ccc").bucket == "ccc"


def test_a_key_among_the_options_is_refused_and_not_repeated():
    with pytest.raises(UserError, match="s3.aws_secret_access_key is no option") as caught:
        options_from({"uri": "s3://bbb", "aws_secret_access_key": "5ecre7"})
    assert "5ecre7" not in str(caught.value)


def test_encryption_needs_to_make_sense():
    with pytest.raises(UserError, match="AES256"):
        S3Options("s3://bbb", server_side_encryption="rot13")
    with pytest.raises(UserError, match="aws:kms"):
        S3Options("s3://bbb", sse_kms_key_id="abc")

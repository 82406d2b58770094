"""Credentials that expire: renewed in time by a process, an endpoint or in a file, or never; on a real S3 server."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from expiring_keys import Keys
from faulty_proxy import FaultyProxy
from lockstep.runs.errors import UserError
from lockstep.storage import local_copy as module
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options
from object_store import IDENTITIES, shared_store

OBJECTS = {f"photographs/{n % 3}/{n}.jpg": os.urandom(1000 + n) for n in range(60)}


def found_by(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    keys = Keys(way, folder)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in keys.environment.items():
        monkeypatch.setenv(name, value)
    return keys


@pytest.fixture(scope="module")
def bucket_name():
    server = shared_store()
    name, client = server.new_bucket(), server.client()
    for key, data in OBJECTS.items():
        client.put_object(Bucket=name, Key=key, Body=data)
    return name


@pytest.fixture
def proxy():
    with FaultyProxy(urlsplit(shared_store().endpoint_url).port) as made:
        yield made


def copied(bucket_name, proxy, cache) -> Path:
    s3 = {"endpoint_url": proxy.endpoint_url}
    return module.local_copy(f"s3://{bucket_name}/photographs", s3, cache, {".jpg"})


@pytest.mark.parametrize("way", ["process", "endpoint", "file"])
def test_they_are_renewed_while_data_are_read(way, bucket_name, proxy, tmp_path, monkeypatch):
    keys, append, begun = found_by(way, tmp_path, monkeypatch), module.Copy._append, []

    def then_expire(self, entry, part):
        begun.append(entry)
        if len(begun) == 20:
            keys.are("renewed")
            proxy.expire(IDENTITIES["ci"][0])
        append(self, entry, part)

    monkeypatch.setattr(module.Copy, "_append", then_expire)
    monkeypatch.setattr(module, "DELAYS_S", (0.05,) * 40)
    keys.are("ci")
    folder = copied(bucket_name, proxy, tmp_path)
    assert {f"photographs/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.jpg")} == OBJECTS


@pytest.mark.parametrize("way", ["process", "endpoint", "file"])
def test_they_are_renewed_in_the_midst_of_an_upload(way, bucket_name, proxy, tmp_path, monkeypatch):
    keys, data = found_by(way, tmp_path, monkeypatch), os.urandom(24 * 2**20)
    keys.are("ci")
    store = S3Store(S3Options(f"s3://{bucket_name}", proxy.endpoint_url), part_bytes=5 * 2**20)
    call, sent = store.requests.call, []

    def then_expire(method, **arguments):
        sent.append(method)
        if sent.count("upload_part") == 2 and method == "upload_part":
            keys.are("renewed")
            proxy.expire(IDENTITIES["ci"][0])
        return call(method, **arguments)

    monkeypatch.setattr(store.requests, "call", then_expire)
    (tmp_path / "checkpoint").write_bytes(data)
    store.put("checkpoint", tmp_path / "checkpoint")
    assert b"".join(store.get("checkpoint").blocks) == data and sent.count("upload_part") == 5


@pytest.mark.parametrize("way", ["process", "endpoint", "file"])
def test_they_are_never_renewed(way, bucket_name, proxy, tmp_path, monkeypatch, caplog):
    keys = found_by(way, tmp_path, monkeypatch)
    keys.are("ci", seconds=-5)
    proxy.expire(IDENTITIES["ci"][0])
    with pytest.raises(UserError, match="cannot be read: the temporary credentials have expired: renew them.$"):
        copied(bucket_name, proxy, tmp_path)
    store = S3Store(S3Options(f"s3://{bucket_name}", proxy.endpoint_url))
    with pytest.raises(StoreError, match="^the temporary credentials have expired: renew them$"):
        store.put("checkpoint", b"data")
    assert caplog.text == ""

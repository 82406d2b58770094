"""An S3 bucket as an ObjectStore, by boto3: objects that are whole and verified, and compare-and-swap."""

import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.storage.background import in_parallel
from lockstep.storage.object_store import Content, StoredObject, StoreError, never
from lockstep.storage.s3_client import S3Requests
from lockstep.storage.s3_options import S3Options
from lockstep.storage.s3_parts import PART_BYTES, PartUploads, Sums, check_local

READ_BYTES = 2**20
PROBING_WRITERS = 3


class S3Store:
    """ObjectStore (object_store.py) over one bucket.

    Args:
        client: boto3's, or anything with its methods.
        part_bytes: a larger file goes in parts of at least this.
    """

    def __init__(self, options: S3Options, client: Any = None, part_bytes: int = PART_BYTES) -> None:
        self.options, self.requests = options, S3Requests(options, client)
        self.parts = PartUploads(self.requests, part_bytes)

    @property
    def root(self) -> str:
        return f"s3://{self.options.bucket}/"

    @property
    def prefix(self) -> str:
        return f"{self.options.prefix}/" if self.options.prefix else ""

    @property
    def web_root(self) -> str:
        """The endpoint may have come from the environment or a profile, which the client knows."""
        return f"{web_host(self.requests.client.meta.endpoint_url, self.options.bucket)}/"

    # put: one request for a small object, parts for a large one; then the store is asked what it holds

    def put(
        self,
        key: str,
        source: Path | bytes,
        *,
        sha256: str | None = None,
        cancelled: Callable[[], bool] = never,
        content_type: str | None = None,
    ) -> StoredObject:
        self.parts.end_unfinished()
        arguments = self.options.put_arguments()
        if content_type is not None:  # a page is written again under its name
            arguments.update(ContentType=content_type, CacheControl="no-cache")
        if isinstance(source, bytes):
            return self._verified(key, len(source), self._put(key, source, sha256, arguments))
        with self.requests.translated():
            file = open(source, "rb")  # noqa: SIM115 (closed below; opening has its own error sentence)
        with file:
            size = os.fstat(file.fileno()).st_size
            if size <= self.parts.part_bytes:
                sums = self._put(key, file.read(size), sha256, arguments)
            else:
                metadata = {"Metadata": {"sha256": sha256}} if sha256 else {}
                sums = self.parts.send(file, size, key, {**arguments, **metadata}, sha256, cancelled)
        return self._verified(key, size, sums)

    def _put(self, key: str, data: bytes, sha256: str | None, arguments: dict[str, str]) -> Sums:
        digest = hashlib.sha256(data)
        check_local(key, sha256, digest.hexdigest())
        sums = Sums(digest.hexdigest(), base64.b64encode(digest.digest()).decode())
        metadata = {"sha256": sums.sha256}
        self.requests.call(
            "put_object", Key=key, Body=data, ChecksumSHA256=sums.as_stored, Metadata=metadata, **arguments
        )
        return sums

    def _verified(self, key: str, size: int, sums: Sums) -> StoredObject:
        """Ask the store what it holds; where it keeps no checksums, read the object back."""
        head = self.requests.call("head_object", Key=key, ChecksumMode="ENABLED")
        stored = head.get(f"Checksum{sums.algorithm}")
        if stored is not None and stored.partition("-")[2] != sums.num_parts:
            stored = None  # of another kind than ours, e.g. of the whole object
        intact = head["ContentLength"] == size and (stored or sums.as_stored) == sums.as_stored
        if intact and stored is None:
            intact = self._read_back(key) == sums.sha256
        if not intact:
            raise StoreError("corrupt", f"{key} did not arrive whole, the store holds other bytes than were sent")
        return StoredObject(key, size, sums.sha256, head["ETag"])

    def _read_back(self, key: str) -> str:
        digest = hashlib.sha256()
        for block in self.get(key).blocks:
            digest.update(block)
        return digest.hexdigest()

    # get, head, list, delete

    def get(self, key: str, start: int = 0, etag: str | None = None, size: int | None = None) -> Content:
        arguments = {"IfMatch": etag} if etag else {}
        if start or size is not None:
            arguments["Range"] = f"bytes={start}-{'' if size is None else start + size - 1}"
        answer = self.requests.call("get_object", Key=key, **arguments)

        def blocks() -> Iterator[bytes]:
            with self.requests.translated():
                yield from answer["Body"].iter_chunks(READ_BYTES)

        return Content(answer["ETag"], answer["ContentLength"], blocks())

    def head(self, key: str) -> StoredObject:
        answer = self.requests.call("head_object", Key=key)
        return StoredObject(key, answer["ContentLength"], answer["Metadata"].get("sha256", ""), answer["ETag"])

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from ((key, size) for key, size, _ in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        """`list` with each object's ETag."""
        token: dict[str, str] = {}
        while True:
            page = self.requests.call("list_objects_v2", Prefix=prefix, **token)
            yield from ((entry["Key"], entry["Size"], entry["ETag"]) for entry in page.get("Contents", []))
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str, *, only_unfinished: bool = False) -> None:
        if only_unfinished:
            self.parts.sweep(key)
        else:
            self.requests.call("delete_object", Key=key)

    def signed(self, key: str, seconds: float) -> str:
        where = {"Bucket": self.options.bucket, "Key": key}
        with self.requests.translated():
            address: str = self.requests.client.generate_presigned_url("get_object", where, ExpiresIn=int(seconds))
        return address

    # swap and probe

    def swap(self, key: str, data: bytes, etag: str | None) -> None:
        try:
            if self._etag(key) != etag:  # a store that ignores the condition below is still compared once
                raise StoreError("conflict", "another process wrote the object in the meantime")
            condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
            self._put(key, data, None, {**self.options.encryption(), **condition})
        except StoreError as error:
            if error.kind != "conflict" or b"".join(self.get(key).blocks) != data:
                raise

    def _etag(self, key: str) -> str | None:
        try:
            return self.head(key).etag
        except StoreError as error:
            if error.kind != "missing":
                raise
            return None

    def probe(self, prefix: str) -> bool:
        key = f"{prefix}probe-{secrets.token_hex(6)}"
        etag = self.put(key, b"probe").etag
        try:
            return self._one_wins(f"{key}-new", {"IfNoneMatch": "*"}) and self._one_wins(key, {"IfMatch": etag})
        finally:
            self.delete(key)
            self.delete(f"{key}-new")

    def _one_wins(self, key: str, condition: dict[str, str]) -> bool:
        """Of a few writers at once, each under the same condition."""

        def write(number: int) -> int:
            try:
                self._put(key, f"writer {number}".encode(), None, {**self.options.put_arguments(), **condition})
            except StoreError as error:
                if error.kind in ("unreachable", "busy"):
                    raise
                return 0
            return 1

        return sum(in_parallel(write, ((number,) for number in range(PROBING_WRITERS)), PROBING_WRITERS)) == 1


def web_host(endpoint_url: str, bucket: str) -> str:
    if not (urlsplit(endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return f"{endpoint_url.rstrip('/')}/{bucket}"
    # A name with dots does not fit Amazon's certificate.
    return f"https://s3.amazonaws.com/{bucket}" if "." in bucket else f"https://{bucket}.s3.amazonaws.com"

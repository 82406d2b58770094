"""A TCP proxy in front of the S3 server that can be away, answer 503, lose and delay, or find keys expired.

with FaultyProxy(port) as proxy: proxy.mode = "503"
"""

import contextlib
import random
import socket
import threading
import time


class FaultyProxy:
    """modes: pass; away (connections are reset); 503; lossy (30 % of the connections broken off, the others slow)."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.target_port, self.mode, self.chance = target_port, "pass", random.Random(seed)
        self.expired: set[bytes] = set()
        self.living: set[socket.socket] = set()

    def __enter__(self) -> "FaultyProxy":
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.cut()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection that is open."""
        for connection in list(self.living):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def be(self, mode: str) -> None:
        self.mode = mode
        self.cut()

    def expire(self, key_id: str) -> None:
        """From now on, as a store does with temporary credentials that nobody renewed."""
        self.expired.add(key_id.encode())
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        mode = self.mode
        self.living.add(client)
        try:
            if mode == "away":
                return
            if mode == "503":
                self._refuse(client, self._head(client), "503 Slow Down", "SlowDown")
                return
            head = self._head(client) if self.expired else b""
            if any(key_id in head for key_id in self.expired):
                self._refuse(client, head, "400 Bad Request", "ExpiredToken")
                return
            with socket.create_connection(("127.0.0.1", self.target_port)) as store:
                self.living.add(store)
                store.sendall(head)
                doomed_after = (
                    self.chance.randrange(200_000) if mode == "lossy" and self.chance.random() < 0.3 else None
                )
                pumps = [
                    threading.Thread(target=self._pump, args=(client, store, mode, doomed_after), daemon=True),
                    threading.Thread(target=self._pump, args=(store, client, mode, None), daemon=True),
                ]
                for pump in pumps:
                    pump.start()
                for pump in pumps:
                    pump.join()
                self.living.discard(store)
        except OSError:
            pass
        finally:
            self.living.discard(client)
            client.close()

    def _head(self, client: socket.socket) -> bytes:
        """A request as far as its head is whole."""
        head = b""
        client.settimeout(2)
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in head and (part := client.recv(65536)):
                head += part
        client.settimeout(None)
        return head

    def _refuse(self, client: socket.socket, head: bytes, status: str, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        client.settimeout(2)
        with contextlib.suppress(OSError):
            client.sendall(
                f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n".encode()
                + f"Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if head.startswith(b"HEAD") else body)
            )  # fmt: skip
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass

    def _pump(self, source: socket.socket, target: socket.socket, mode: str, doomed_after: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if mode == "lossy":
                    time.sleep(0.05)
                passed += len(data)
                if doomed_after is not None and passed > doomed_after:
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

"""A TCP proxy in front of the S3 server that breaks off 30 % of the connections and slows the others.

with FaultyProxy(port) as proxy: Bucket(uri, proxy.endpoint_url)
"""

import contextlib
import random
import socket
import threading
import time


class FaultyProxy:
    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.target_port, self.chance = target_port, random.Random(seed)
        self.living: set[socket.socket] = set()

    def __enter__(self) -> "FaultyProxy":
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint_url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        for connection in list(self.living):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed_after = self.chance.randrange(200_000) if self.chance.random() < 0.3 else None
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target_port)) as store:
            self.living |= {client, store}
            ends = ((client, store, doomed_after), (store, client, None))
            pumps = [threading.Thread(target=self._pump, args=given, daemon=True) for given in ends]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()
            self.living -= {client, store}

    def _pump(self, source: socket.socket, target: socket.socket, doomed_after: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(0.05)
                passed += len(data)
                if doomed_after is not None and passed > doomed_after:
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

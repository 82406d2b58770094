"""A cable between two network namespaces that loses and delays frames, carried by this process: many kernels have no
netem. Frames go through raw sockets, so segmentation and checksums must be done before they come here.

    with LossyCable(one, two) as cable: cable.loss, cable.delay_s = 0.3, 0.5
"""

import contextlib
import heapq
import random
import select
import socket
import subprocess
import threading
import time

from hosts import INTERFACE, Host

CHECKSUMS_OFF = """
import array, fcntl, socket, struct, sys
value = array.array("I", [0x17, 0])  # ETHTOOL_STXCSUM off
request = struct.pack("16sP", sys.argv[1].encode(), value.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)
"""


class LossyCable:
    """Takes the place of the cable that joins two hosts; passes everything at once until told otherwise."""

    def __init__(self, one: Host, two: Host, seed: int = 0) -> None:
        self.hosts, self.loss, self.delay_s = (one, two), 0.0, 0.0
        self.chance, self.ended = random.Random(seed), threading.Event()
        self.passed = self.lost = self.lossy = 0  # frames; lossy: those that could have been lost

    def __enter__(self) -> "LossyCable":
        self.hosts[0].run("ip", "link", "del", INTERFACE)  # its other end goes with it
        self.sockets = []
        for index, host in enumerate(self.hosts):
            end = f"lscable{index}"
            subprocess.run(["ip", "link", "add", end, "type", "veth", "peer", "name", f"{end}h"], check=True)
            subprocess.run(
                ["ip", "link", "set", f"{end}h", "netns", str(host.holder.pid), "name", INTERFACE], check=True
            )
            host.run("ip", "link", "set", INTERFACE, "gso_max_segs", "1", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("python3", "-c", CHECKSUMS_OFF, INTERFACE)
            subprocess.run(["ip", "link", "set", end, "up"], check=True)
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            raw.bind((end, 0))
            self.sockets.append(raw)
        self.thread = threading.Thread(target=self._carry, daemon=True)
        self.thread.start()
        return self

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self.ended.is_set():
            due_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for source in select.select(self.sockets, [], [], min(due_s, 0.1))[0]:
                frame, address = source.recvfrom(65536)
                if address[2] == socket.PACKET_OUTGOING:
                    continue
                self.lossy += self.loss > 0
                if self.chance.random() < self.loss:
                    self.lost += 1
                    continue
                self.passed += 1
                target = 1 - self.sockets.index(source)
                heapq.heappush(waiting, (time.monotonic() + self.delay_s, self.passed, target, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    self.sockets[target].send(frame)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(5)
        for index, raw in enumerate(self.sockets):
            raw.close()
            subprocess.run(["ip", "link", "del", f"lscable{index}"], capture_output=True)

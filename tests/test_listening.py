"""What listens while a run of one machine trains: nothing that another machine could reach."""

import ipaddress

import psutil
import pytest

from runs import start_door

SMALL = [
    "trainer=ddp_sim", "data=synthetic", "data.num_images=2000", "model=small_cnn", "test=false",
    "trainer.max_epochs=1000", "data.image_size=8",
]  # fmt: skip


def listening(process):
    """(type, address) of every socket of this process and its children that waits for others."""
    for member in [process, *process.children(recursive=True)]:
        for found in member.net_connections("inet"):
            if found.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                yield found.type.name, found.laddr.ip


@pytest.fixture
def training(tmp_path):
    """A run of two ranks in its training; stopped at the end."""
    started = start_door("train", *SMALL, logs=tmp_path)
    try:
        started.wait_for(lambda: any(tmp_path.rglob("*.ckpt.json")))
        yield psutil.Process(started.process.pid)
    finally:
        started.process.terminate()
        assert started.done().code == 75, started.text()


def test_the_ranks_of_one_machine_listen_on_loopback_only(training):
    """The store and gloo; heartbeats and the secret go over inherited descriptors."""
    found = list(listening(training))
    assert len(found) >= 3 and {kind for kind, _ in found} == {"SOCK_STREAM"}
    assert [ip for _, ip in found if not ipaddress.ip_address(ip).is_loopback] == []
    # the supervisor itself
    assert [found for found in training.net_connections("inet") if found.status == psutil.CONN_LISTEN] == []

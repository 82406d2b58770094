"""What listens while a run of one machine trains: nothing that another machine could reach."""

import ipaddress

import psutil

from runs import start_door


def listening(process):
    """(type, address) of every socket of this process and its children that waits for others."""
    for member in [process, *process.children(recursive=True)]:
        for found in member.net_connections("inet"):
            if found.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                yield found.type.name, found.laddr.ip


def test_the_ranks_of_one_machine_listen_on_loopback_only(tmp_path):
    started = start_door(
        "train", "trainer=ddp_sim", "data=synthetic", "data.num_images=2000", "model=small_cnn", "test=false",
        "trainer.max_epochs=1000", "data.image_size=8", logs=tmp_path,
    )  # fmt: skip
    try:
        started.wait_for(lambda: any(tmp_path.rglob("*.ckpt.json")))
        found = list(listening(psutil.Process(started.process.pid)))
    finally:
        started.process.terminate()
        assert started.done().code == 75, started.text()
    assert len(found) >= 4 and {kind for kind, _ in found} == {"SOCK_STREAM", "SOCK_DGRAM"}
    assert [ip for _, ip in found if not ipaddress.ip_address(ip).is_loopback] == []

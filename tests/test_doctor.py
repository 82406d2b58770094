"""The doctor and the checks of each distributed run: one sentence per finding, with its remedy."""

import json
import socket

import pytest

import doctor
from local_ranks import run_ranks
from lockstep.config.compose import compose, plain
from lockstep.process.gpu_builds import Card, Machine
from lockstep.ranks import gpus
from ranks import free_port

NODES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
TWO = ("trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2")


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)  # a worker of the tests has one


def findings(*words, **environment):
    """(whether it is fine, what was found with what mends it) of each check."""
    found = doctor.examine(plain(compose("train", list(words))), environment)
    return [(fine, f"{said}: {remedy}") for fine, said, remedy in found]


def faults(*words, **environment):
    return [sentence for fine, sentence in findings(*words, **environment) if not fine]


def test_what_a_machine_lacks_makes_the_exit_code(tmp_path, monkeypatch, capsys):
    words = ["trainer=cpu", f"paths.log_dir={tmp_path / 'not/yet'}"]
    assert doctor.main(words) == 0
    named = capsys.readouterr().out
    parts = (
        "GiB free",
        "shared memory",
        "file handles",
        "the clock says",
        "temporary files",
        "1 ranks on 1 nodes",
        "cores for",
    )
    assert [part for part in parts if part not in named] == []
    monkeypatch.setattr(doctor, "MIN_FILE_HANDLES", 2**40)
    assert doctor.main(["--json", *words]) == 1
    [bad] = [each["finding"] for each in json.loads(capsys.readouterr().out) if not each["ok"]]
    assert bad.endswith(" file handles: ulimit -n 65536.")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("doctor.MIN_DISK_BYTES", 2**60, "pass paths.log_dir=OTHER"),
        ("doctor.MIN_SHARED_BYTES", 2**60, "docker run --shm-size=8g"),
        ("doctor.FIRST_YEAR", 2999, "timedatectl set-ntp true"),
        ("doctor.available_cores", lambda: 1, "1 cores for 2 ranks: #SBATCH --cpus-per-task"),
        ("tempfile.tempdir", "/tmp/" + 80 * "x", "export TMPDIR=/tmp"),
    ],
)
def test_what_this_machine_lacks_is_named_with_its_remedy(
    name, value, remedy, monkeypatch, tmp_path
):
    monkeypatch.setattr(name, value)
    [fault] = faults("trainer=ddp_sim", f"paths.log_dir={tmp_path}")
    assert remedy in fault


def test_a_place_options_or_an_interface_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    said = faults("trainer=cpu", "data.global_batch_size=0", f"paths.log_dir={tmp_path / 'file/x'}")
    assert (
        len(said) == 2 and "paths.log_dir=" in said[0] and "data.global_batch_size=0" in said[1]
    ), said
    [said] = faults("trainer=cpu", f"paths.log_dir={tmp_path}", NCCL_SOCKET_IFNAME="=lo,eth77")
    assert "NCCL_SOCKET_IFNAME=eth77: there are" in said
    for fine in ("^docker0,lo", "l", "=lo"):
        assert faults("trainer=cpu", f"paths.log_dir={tmp_path}", NCCL_SOCKET_IFNAME=fine) == []
    assert len(faults("trainer=cpu", f"paths.log_dir={tmp_path}", NCCL_SOCKET_IFNAME="=l")) == 1


def test_a_wrong_driver_and_efa_without_plugin_are_named(monkeypatch, tmp_path):
    (tmp_path / "efa_0").mkdir()
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path)
    monkeypatch.setattr(gpus, "read_machine", lambda: Machine("535.54.03", [Card("T4", (7, 5))]))
    driver, efa = doctor._check_gpus(1)
    assert not driver[0] and "cannot use the driver" in driver[1] and "DEVICE=cu126" in driver[1]
    assert not efa[0] and "install aws-ofi-nccl" in efa[2]


def test_another_node_that_is_not_there_is_named(tmp_path):
    said = faults(
        *TWO,
        "trainer.timeout_s=1",
        f"paths.log_dir={tmp_path}",
        **NODES | {"MASTER_PORT": str(free_port())},
    )
    assert "node rank 1 did not arrive" in said[-1]


def diagnose_node(place, port):
    return findings(
        *TWO,
        "trainer.timeout_s=30",
        **NODES | {"MASTER_PORT": str(port), "NODE_RANK": str(place.rank)},
    )


@pytest.mark.slow
def test_two_nodes_find_each_other_equal_and_measure_their_network():
    for found in run_ranks(diagnose_node, 2, free_port()):
        assert all(fine for fine, _ in found), found
        assert (
            found[-2][1].startswith("same code, options and packages on all nodes: ")
            and "by gloo: " in found[-1][1]
        )


@pytest.mark.parametrize(("interface", "fine"), [("lo", False), ("eth0", True), (None, True)])
def test_a_master_that_only_its_own_host_reaches_is_named(interface, fine, monkeypatch):
    monkeypatch.setattr(doctor, "network_interface", lambda _: interface)
    monkeypatch.setattr(doctor, "_check_other_nodes", lambda *_: ())
    found = dict(findings(*TWO, **NODES | {"MASTER_ADDR": "node0"}))
    assert ("/etc/hosts" in found.get(False, "")) != fine


def test_an_unforeseen_error_of_a_bucket_is_named(monkeypatch):
    def fail(bucket):
        raise KeyError("Region")

    monkeypatch.setattr("lockstep.storage.s3.Bucket.check_writable", fail)
    [(fine, found, _)] = doctor._check_bucket({"uri": "s3://bucket/x"})
    assert not fine and found == "s3: KeyError: 'Region'"


def test_a_bucket_that_is_silent_or_not_there_takes_seconds(monkeypatch):
    for name, value in {
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "hidden",
        "DEFAULT_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for wait_s, is_silent, said in ((0.2, True, "s3: no answer"), (6.0, False, "s3: ")):
        monkeypatch.setattr(doctor, "BUCKET_WAIT_S", wait_s)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1] if is_silent else free_port()
            [(fine, found, _)] = doctor._check_bucket(
                {"uri": "s3://bucket/x", "endpoint_url": f"http://127.0.0.1:{port}"}
            )
        assert not fine and found.startswith(said) and "hidden" not in found

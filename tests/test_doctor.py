"""The doctor and the checks of each distributed run: one sentence per finding, with its mend."""

import json
import socket

import pytest

import doctor
from local_ranks import run_ranks
from lockstep.config.compose import compose, plain
from ranks import free_port


def config_of(*words):
    return plain(compose("train", list(words)))


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)  # a worker of the tests has one


def findings(config, environment):
    return list(doctor.examine(config, "ddp_sim", environment))


def test_a_machine_alone_is_ready(tmp_path):
    words = ("trainer=cpu", "data.global_batch_size=max", f"paths.log_dir={tmp_path / 'not/yet'}")
    found = findings(config_of(*words), {})
    assert all(fine for fine, _ in found), found
    text = " ".join(sentence for _, sentence in found)
    for what in (
        "GiB free",
        "shared memory",
        "file handles",
        "clock",
        "packages installed",
        "1 ranks on 1 nodes",
        "cores",
    ):
        assert what in text


def test_a_script_reads_its_findings_and_its_exit_code(monkeypatch, tmp_path, capfd):
    words = ["--json", "experiment=quickstart", f"paths.log_dir={tmp_path}"]
    assert doctor.main(words) == 0
    assert {each["ok"] for each in json.loads(capfd.readouterr().out)} == {True}
    monkeypatch.setattr(doctor, "HANDLES", 2**40)
    assert doctor.main(words) == 1
    [bad] = [each["finding"] for each in json.loads(capfd.readouterr().out) if not each["ok"]]
    assert bad.endswith(" file handles: ulimit -n 65536.")


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("doctor.DISK", 2**60, "pass paths.log_dir=OTHER"),
        ("doctor.SHARED", 2**60, "docker run --shm-size=8g"),
        ("doctor.FIRST_YEAR", 2999, "timedatectl set-ntp true"),
        ("doctor.available_cores", lambda: 1, "1 cores for 2 ranks: #SBATCH --cpus-per-task"),
        ("tempfile.tempdir", "/tmp/" + 80 * "x", "export TMPDIR=/tmp"),
        ("doctor.provenance.versions", lambda: {"timm": "missing"}, "timm not installed: make install"),
    ],
)
def test_what_this_machine_lacks_is_named_with_its_mend(name, value, mend, monkeypatch, tmp_path):
    monkeypatch.setattr(name, value)
    found = findings(config_of("trainer=ddp_sim", f"paths.log_dir={tmp_path}"), {})
    assert [mend in sentence for fine, sentence in found if not fine] == [True], found


def test_a_place_options_or_an_interface_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    words = ("trainer=cpu", "data.global_batch_size=0", f"paths.log_dir={tmp_path / 'file/x'}")
    said = [sentence for fine, sentence in findings(config_of(*words), {}) if not fine]
    assert len(said) == 2 and "paths.log_dir=" in said[0] and "data.global_batch_size=0" in said[1], said
    found = findings(config_of("trainer=cpu", f"paths.log_dir={tmp_path}"), {"NCCL_SOCKET_IFNAME": "=lo,eth77"})
    assert ["NCCL_SOCKET_IFNAME=eth77: there are" in sentence for fine, sentence in found if not fine] == [True]


def test_efa_without_its_plugin_and_a_driver_that_torch_cannot_use_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    [(fine, sentence)] = doctor._gpus()
    assert not fine and "a driver for CUDA" in sentence
    (tmp_path / "efa_0").mkdir()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path)
    [(fine, sentence)] = doctor._gpus()
    assert not fine and "install aws-ofi-nccl" in sentence


NODES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}


def test_another_node_that_is_not_there_is_named():
    config = config_of("trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2", "trainer.timeout_s=1")
    found = findings(config, {**NODES, "MASTER_PORT": str(free_port())})
    assert found[-1][0] is False and "node rank 1 did not arrive" in found[-1][1]


def diagnose_node(place, port):
    config = config_of("trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2", "trainer.timeout_s=30")
    return findings(config, {**NODES, "MASTER_PORT": str(port), "NODE_RANK": str(place.rank)})


def test_two_nodes_find_each_other_equal_and_measure_their_network():
    for found in run_ranks(diagnose_node, 2, free_port()):
        assert all(fine for fine, _ in found), found
        assert found[-3][1].startswith("same code, options and packages on all nodes: ")
        assert found[-2][1].startswith("clocks differ by 0.") and "all-reduce by gloo: " in found[-1][1]


def test_a_port_that_another_program_uses_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = {"MASTER_PORT": str(other.getsockname()[1])}
        config = config_of("trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2", f"paths.log_dir={tmp_path}")
        fine, sentence = findings(config, NODES | port)[-1]
    assert not fine and "MASTER_PORT" in sentence, sentence


@pytest.mark.parametrize(("interface", "fine"), [("lo", False), ("eth0", True), (None, True)])
def test_a_master_that_only_its_own_host_reaches_is_named(interface, fine, monkeypatch):
    monkeypatch.setattr(doctor, "network_interface", lambda _: interface)
    monkeypatch.setattr(doctor, "_other_nodes", lambda *_: ())
    config = config_of("trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2")
    [(ok, sentence)] = [each for each in findings(config, NODES | {"MASTER_ADDR": "node0"}) if "node0" in each[1]]
    assert ok == fine and ("/etc/hosts" in sentence) != fine


def test_a_bucket_that_does_not_answer_takes_seconds(monkeypatch):
    monkeypatch.setattr(doctor, "BUCKET_WAIT_S", 0.2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        s3 = {"uri": "s3://bucket/x", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        [(fine, sentence)] = doctor._bucket(s3)
    assert not fine and "correct s3.endpoint_url" in sentence


def test_a_bucket_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = config_of("trainer=cpu", "s3.uri=s3://bucket/x", f"s3.endpoint_url=http://127.0.0.1:{free_port()}")
    [(fine, sentence)] = doctor._bucket(config["s3"])
    assert not fine and sentence.startswith("s3: ") and "secret" not in sentence

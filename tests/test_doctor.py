"""The doctor and the checks of each distributed run: one sentence per finding, with its mend."""

import pytest

import doctor
from local_ranks import run_ranks
from lockstep.config.compose import compose, plain
from lockstep.launch import launchers
from lockstep.launch.launchers import Cluster
from ranks import free_port


def config_of(*words):
    return plain(compose("train", list(words)))


def findings(config, environment):
    return list(doctor.examine(config, "ddp_sim", environment))


def test_a_machine_alone_is_ready(tmp_path):
    found = findings(config_of("trainer=cpu", f"paths.log_dir={tmp_path / 'not/yet'}"), {})
    assert all(fine for fine, _ in found)
    text = " ".join(sentence for _, sentence in found)
    assert "1 ranks on 1 nodes" in text and "GiB free" in text and "packages installed" in text


def test_a_batch_to_be_found_is_no_contradiction(tmp_path):
    found = findings(config_of("trainer=cpu", "data.global_batch_size=max", f"paths.log_dir={tmp_path}"), {})
    assert all(fine for fine, _ in found) and len(found) > 3, found


NODES = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "NODE_RANK": "0",
}


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
        assert found[-2][1].startswith("same code, options and packages on all nodes: ")
        assert found[-1][1].startswith("all-reduce: ") and "MiB/s" in found[-1][1]


@pytest.mark.parametrize(
    ("interface", "environ", "mend"), [("lo", {}, "/etc/hosts"), ("eth0", {"RANK": "0"}, "unset RANK")]
)
def test_what_keeps_the_nodes_apart_is_named(interface, environ, mend, monkeypatch):
    monkeypatch.setattr(launchers, "network_interface", lambda _: interface)
    [sentence] = launchers.faults(Cluster("nodes", 2, 1, 0, None, "node0", 29500), environ)
    assert mend in sentence


def test_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "FREE_DISK_GIB", 1e9)
    found = findings(config_of("trainer=cpu", f"paths.log_dir={tmp_path}"), {})
    assert ["make room" in sentence for fine, sentence in found if not fine] == [True]


def test_a_bucket_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = config_of("trainer=cpu", "s3.uri=s3://bucket/x", f"s3.endpoint_url=http://127.0.0.1:{free_port()}")
    [(fine, sentence)] = doctor._bucket(config["s3"])
    assert not fine and sentence.startswith("s3: ") and "secret" not in sentence

"""A rank's environment variables: what libraries beneath read, and how many GPUs are to be seen."""

from lockstep.distributed import cluster

SECOND = cluster.Cluster("torchrun", 2, 4, 1, 1, "10.0.0.1", 29500)


def test_a_plan_is_named_to_supervised_ranks_alone():
    assert cluster.plan_file({}) is None
    assert str(cluster.plan_file({cluster.PLAN_FILE: "/run/plan-node0.yaml"})) == "/run/plan-node0.yaml"


def test_chosen_gpus_are_counted_without_a_driver():
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1f, 2,-1,3"}) == 2


def test_the_interface_towards_the_master_is_gloos_where_nobody_chose(monkeypatch):
    monkeypatch.setattr(cluster, "network_interface", lambda _: "net7")
    found = {}
    cluster.adopt(SECOND, found)
    assert found["GLOO_SOCKET_IFNAME"] == "net7" and found["RANK"] == "5"
    found = {"GLOO_SOCKET_IFNAME": "mine"}
    cluster.adopt(SECOND, found)
    assert found["GLOO_SOCKET_IFNAME"] == "mine"
    alone = {}
    cluster.adopt(cluster.Cluster("none", 1, 1, 0, 0, "127.0.0.1", None), alone)
    assert "GLOO_SOCKET_IFNAME" not in alone


def test_memory_segments_expand_unless_the_user_says_otherwise():
    alone = cluster.Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
    cluster.adopt(alone, found := {})
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        cluster.adopt(alone, found := {name: "backend:native"})
        assert {key: value for key, value in found.items() if "ALLOC" in key} == {name: "backend:native"}


def test_gloo_of_one_machines_ranks_stays_on_loopback(monkeypatch):
    monkeypatch.setattr(cluster, "network_interface", lambda address: f"towards {address}")
    found = {}
    cluster.adopt(cluster.Cluster("supervisor", 1, 2, 0, 1, "10.0.0.1", 29500), found)
    assert found["GLOO_SOCKET_IFNAME"] == "towards 127.0.0.1"
    cluster.adopt(cluster.Cluster("supervisor", 2, 2, 0, 1, "10.0.0.1", 29500), found := {})
    assert found["GLOO_SOCKET_IFNAME"] == "towards 10.0.0.1"


def test_the_interface_of_an_address():
    assert cluster.network_interface("127.0.0.1") == "lo"
    assert cluster.network_interface("no.such.host.invalid") is None

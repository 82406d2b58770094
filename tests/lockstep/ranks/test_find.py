"""The table of launchers: how each is recognised, and what it says of cluster, run and command."""

import os

import pytest

from lockstep.config.compose import compose, plain
from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.ranks.find import (
    AGENT,
    Cluster,
    find_ranks,
    find_requested_run_id,
    find_restart_id,
    read_cluster,
    set_rank_environment,
)
from lockstep.ranks.placement import RequestedDevices
from lockstep.records.folder import validate_run_id

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
NODES = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "NODE_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip


RANKS = {"RANK": "0", "WORLD_SIZE": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip


def ask(environ, ranks_per_node=None, num_nodes=None, several=True, default_ranks=1):
    return read_cluster(
        environ, RequestedDevices(ranks_per_node, num_nodes, several, default_ranks)
    )


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        ({}, {"several": False}, ("none", 0, 0, 1, 1)),
        ({}, {"ranks_per_node": 2}, ("none", 0, None, 2, 1)),  # it starts two
        (
            NODES,
            {"ranks_per_node": 1, "num_nodes": 2},
            ("nodes", 1, 0, 1, 2),
        ),  # it is the only rank of its node
        (
            {**NODES, "WORLD_SIZE": "4"},
            {"ranks_per_node": 2, "num_nodes": 2},
            ("nodes", 2, None, 2, 2),
        ),
        (TORCHRUN, {}, ("torchrun", 5, 1, 4, 2)),
        (SLURM, {}, ("slurm", 3, 1, 2, 2)),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            {},
            ("none", 0, 0, 1, 1),
        ),  # no srun
        (MPI, {}, ("mpirun", 3, 1, 2, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, {}, ("mpiexec", 1, 1, 2, 1)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS},
            {},
            ("env", 1, 0, 1, 2),
        ),  # PyTorchJob: one pod, one process
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **ADDRESS},
            {"ranks_per_node": 2},
            ("env", 3, 1, 2, 2),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"several": False}, ("env", 0, 0, 1, 1)),
        ({"RANK": "1"}, {}, ("none", 0, 0, 1, 1)),
        # srun with PMI-2, in a step of one task
        (
            {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
            {"default_ranks": 4},
            ("none", 0, None, 4, 1),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, {}, ("mpiexec", 0, 0, 1, 1)),
        (NODES, {"several": False}, ("none", 0, 0, 1, 1)),
        ({**TORCHRUN, **SLURM, AGENT: "1 nodes 2 1 h 1 /my runs"}, {}, ("nodes", 5, 1, 4, 2)),
        (
            {**TORCHRUN, **SLURM, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            {},
            ("torchrun", 5, 1, 4, 2),
        ),
    ],
)
def test_every_launcher_says_which_rank_this_process_is(environ, options, wanted):
    found = ask(environ, **options)
    assert (
        found.launcher,
        found.rank,
        found.local_rank,
        found.ranks_per_node,
        found.num_nodes,
    ) == wanted
    assert found.has_agent_store == (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("n1,n2", "n1"),
        ("n7", "n7"),
        ("a-b[1]", "a-b1"),
        ("r[2-3]-gpu", "r2-gpu"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[1,3]node[03-05,9]x,login", "rack1node03x"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_the_master(nodes, host):
    assert ask({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == host


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        (
            {},
            {"ranks_per_node": 1, "num_nodes": 2},
            "MASTER_ADDR=unset MASTER_PORT=unset NODE_RANK=unset",
        ),
        (NODES, {"ranks_per_node": 1}, "trainer.num_nodes=unset"),
        (
            {**NODES, "NODE_RANK": "2"},
            {"ranks_per_node": 1, "num_nodes": 2},
            "NODE_RANK=2 .* do not fit .* trainer.num_nodes=2",
        ),
        ({**NODES, "WORLD_SIZE": "3"}, {"ranks_per_node": 1, "num_nodes": 2}, "WORLD_SIZE=3"),
        (
            {**NODES, "MASTER_PORT": "x"},
            {"ranks_per_node": 1, "num_nodes": 2},
            "not a whole number",
        ),
        (
            TORCHRUN,
            {"ranks_per_node": 2},
            "torchrun started rank 5 of 8, number 1 of 4 on its node, but trainer.devices=2",
        ),
        (
            {**RANKS, **ADDRESS},
            {"ranks_per_node": 4},
            "rank 0 of 2, number 0 of 4 on its node.* unset RANK and WORLD_SIZE",
        ),
        ({**RANKS, **ADDRESS}, {"several": False}, "unset RANK and WORLD_SIZE"),
        (RANKS, {}, "set MASTER_ADDR and MASTER_PORT"),
        (
            {**RANKS, **ADDRESS, "RANK": "1", "LOCAL_RANK": "1"},
            {},
            "number 1 of 1 on its node, .* Give trainer.devices=",
        ),
        ({**RANKS, **ADDRESS, "RANK": "5"}, {}, "rank 5 of 2"),
        (TORCHRUN, {"several": False}, "runs in one"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "5"}, {}, "every node needs as many ranks"),
    ],
)
def test_contradictions_end_in_one_sentence(environ, options, said):
    with pytest.raises(UserError, match=said):
        ask(environ, **options)


def test_torchrun_says_how_many_ranks_ddp_sim_has():
    config = plain(compose("train", ["trainer=ddp_sim"]))
    cluster = find_ranks(config, TORCHRUN)
    assert (cluster.ranks_per_node, cluster.num_nodes, cluster.accelerator) == (4, 2, "cpu")


@pytest.mark.parametrize("environ", [NODES, TORCHRUN])
def test_an_ipv6_master_may_stand_in_brackets(environ):
    cluster = ask({**environ, "MASTER_ADDR": "[::1]"}, num_nodes=2)
    assert (cluster.master_addr, cluster.num_nodes) == ("::1", 2)


def test_run_id_from_outside():
    assert (
        find_requested_run_id({}, {})
        is find_requested_run_id({}, TORCHRUN)
        is find_requested_run_id({}, {"SLURM_JOB_ID": "7"})
        is None
    )
    assert (
        find_requested_run_id({"run_id": "r"}, SLURM) == "r"
        and find_requested_run_id({}, {**SLURM, "RUN_ID": "mine"}) == "mine"
    )
    assert find_requested_run_id({}, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "night/3"}) == "night-3"
    assert (
        find_requested_run_id({}, SLURM)
        == "slurm-7-0"
        == find_requested_run_id({}, {**TORCHRUN, **SLURM})
    )
    assert find_requested_run_id({}, {**TORCHRUN, **SLURM, "TORCHELASTIC_RUN_ID": "mine"}) == "mine"


def test_who_would_start_this_process_again():
    assert find_restart_id({}) is None and find_restart_id(SLURM) == "slurm-7-0"
    mine = find_restart_id(TORCHRUN)
    assert mine.endswith(f"_torchrun-{os.getppid()}")
    assert (
        mine
        == find_restart_id({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
        == validate_run_id(mine)
    )


@pytest.mark.parametrize(
    ("fast", "stated", "nodes", "gloo", "nccl"),
    [(False, None, 2, "to 10.0.0.1", "=to 10.0.0.1"), (True, None, 2, "to 10.0.0.1", None),
     (False, "mine", 2, "mine", "=to 10.0.0.1"), (False, None, 1, "to 127.0.0.1", None)],
)  # fmt: skip
def test_gloo_and_nccl_take_the_interface_towards_the_master(
    fast, stated, nodes, gloo, nccl, tmp_path, monkeypatch
):
    monkeypatch.setattr("lockstep.ranks.find.network_interface", lambda address: f"to {address}")
    monkeypatch.setattr("lockstep.ranks.find.INFINIBAND", tmp_path)
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
    if stated:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", stated)
    if fast:
        (tmp_path / "efa_0").mkdir()
    set_rank_environment(Cluster("torchrun", nodes, 2, 0, 1, "10.0.0.1", 29500))
    found = environment()
    assert (found["GLOO_SOCKET_IFNAME"], found.get("NCCL_SOCKET_IFNAME"), found["RANK"]) == (
        gloo,
        nccl,
        "1",
    )


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_segments_expand_unless_the_user_says_otherwise(name, monkeypatch):
    if name:
        monkeypatch.setenv(name, "backend:native")
    set_rank_environment(Cluster("none", 1, 1, 0, 0, "127.0.0.1", None))
    found = {key: value for key, value in environment().items() if "ALLOC_CONF" in key}
    assert found == (
        {name: "backend:native"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )

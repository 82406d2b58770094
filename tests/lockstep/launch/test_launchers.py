"""The table of launchers: how each is recognised, and what it says of cluster, run and command."""

import os

import pytest

from lockstep.launch.launchers import (
    AGENT,
    Cluster,
    agent_id,
    command_line,
    describe,
    first_host,
    is_first_on_node,
    launcher_of,
    named_run,
    set_rank_environment,
)
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.runs.folder import checked_run_id
from lockstep.strategies.placement import RequestedDevices

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
NODES = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "NODE_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_PROCID": "3", "SLURM_JOB_NODELIST": "gpu[03-04]",
}  # fmt: skip


MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip


def ask(environ, devices=None, num_nodes=None, several=True, machine=1):
    return describe(environ, RequestedDevices(devices, num_nodes, several, machine))


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        ({}, {"several": False}, ("none", 0, 0, 1, 1)),
        ({}, {"devices": 2}, ("none", 0, None, 2, 1)),  # it starts two
        (NODES, {"devices": 1, "num_nodes": 2}, ("nodes", 1, 0, 1, 2)),  # it is the only rank of its node
        ({**NODES, "WORLD_SIZE": "4"}, {"devices": 2, "num_nodes": 2}, ("nodes", 2, None, 2, 2)),
        ({**NODES, "WORLD_SIZE": "4"}, {"num_nodes": 2}, ("nodes", 2, None, 2, 2)),
        ({**NODES, "WORLD_SIZE": "4"}, {"devices": 2}, ("nodes", 2, None, 2, 2)),
        (TORCHRUN, {}, ("torchrun", 5, 1, 4, 2)),
        (SLURM, {}, ("slurm", 3, 1, 2, 2)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {}, ("none", 0, 0, 1, 1)),  # no srun
        (MPI, {}, ("mpirun", 3, 1, 2, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, {}, ("mpiexec", 1, 1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}, {}, ("env", 1, 0, 1, 2)),  # PyTorchJob: one pod, one process
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **ADDRESS}, {"devices": 2}, ("env", 3, 1, 2, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {}, ("env", 1, 1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"several": False}, ("env", 0, 0, 1, 1)),
    ],
)
def test_every_launcher_says_which_rank_of_how_many_this_process_is(environ, options, wanted):
    found = ask(environ, **options)
    assert (found.launcher, found.rank, found.local_rank, found.devices, found.num_nodes) == wanted


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,9],login", "gpu03"), ("n1,n2", "n1"), ("n7", "n7"), ("a-b[1]", "a-b1"), ("r[2-3]-gpu", "r2-gpu")],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        ({}, {"devices": 1, "num_nodes": 2}, "MASTER_ADDR and MASTER_PORT and NODE_RANK"),
        ({**NODES, "MASTER_PORT": ""}, {"devices": 1, "num_nodes": 2}, "MASTER_PORT not set"),
        ({**NODES, "NODE_RANK": "2"}, {"devices": 1, "num_nodes": 2}, "counts from 0 to 1"),
        ({**NODES, "WORLD_SIZE": "3"}, {"devices": 1, "num_nodes": 2}, "WORLD_SIZE=3"),
        ({**NODES, "MASTER_PORT": "x"}, {"devices": 1, "num_nodes": 2}, "no whole number"),
        (TORCHRUN, {"devices": 2}, "torchrun started 8 processes, 4 on each of 2 nodes, but trainer.devices=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **ADDRESS},
            {"devices": 4},
            "2, 4 on each node: .* unset RANK and WORLD_SIZE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", **ADDRESS}, {"several": False}, "unset RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {}, "give trainer.devices=N"),
        ({"RANK": "5", "WORLD_SIZE": "2", **ADDRESS}, {}, "rank 5 of 2"),
        (TORCHRUN, {"several": False}, "runs in one"),
        (SLURM, {"devices": 4}, "slurm started 4 processes, 2 on each of 2 nodes, but trainer.devices=4"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "5"}, {}, "every node as many"),
    ],
)
def test_contradictions_end_in_one_sentence(environ, options, said):
    with pytest.raises(UserError, match=said):
        ask(environ, **options)


def test_run_id_from_outside():
    assert named_run({}, {}) is None and named_run({"run_id": "r"}, SLURM) == "r"
    assert named_run({}, TORCHRUN) is None
    assert named_run({}, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "night/3"}) == "night-3"
    assert named_run({}, SLURM) == "slurm-7-0"
    assert named_run({}, {"SLURM_JOB_ID": "7"}) is None
    assert named_run({}, {**SLURM, "RUN_ID": "mine"}) == "mine"


def test_who_would_start_this_process_again():
    assert agent_id({}) is None
    assert agent_id(SLURM) == "slurm-7-0"
    mine = agent_id(TORCHRUN)
    assert mine.endswith(f"_torchrun-{os.getppid()}")
    assert mine == agent_id({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}) == checked_run_id(mine)


def test_torchruns_agent_serves_the_store_where_it_says_so():
    assert not ask(TORCHRUN).agent_store
    assert ask({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


def test_neighbouring_jobs_and_steps_of_one_have_ports_of_their_own():
    taken = set()
    for job, step in ((100, 0), (101, 0), (102, 0), (100, 1), (100, 2)):
        environment = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
                       "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}  # fmt: skip
        port = describe(environment, RequestedDevices(machine=2)).master_port
        assert port not in taken and 1024 < port < 32768
        taken.add(port)


ALONE = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "several", "name"),
    [
        ({}, True, "none"),
        (ALONE, True, "none"),
        (NODES, True, "nodes"),
        (NODES, False, "none"),
        (TORCHRUN, True, "torchrun"),
        ({**TORCHRUN, **SLURM}, True, "torchrun"),
        (SLURM, True, "slurm"),
        ({**TORCHRUN, **SLURM, AGENT: "1 none 1 0 h 1"}, True, "agent"),
        ({AGENT: "1 none 1 0 h 1"}, True, "none"),
        ({"RANK": "1"}, True, "none"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True, "env"),
        (MPI, True, "mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True, "mpiexec"),
    ],
)
def test_each_launcher_is_recognised_by_its_environment(environ, several, name):
    found = launcher_of(environ, RequestedDevices(several_processes=several))
    assert found == name


def test_one_rank_of_each_node_prepares_what_the_others_read():
    assert is_first_on_node({}) and is_first_on_node({**TORCHRUN, "LOCAL_RANK": "0"})
    assert is_first_on_node({**SLURM, "SLURM_LOCALID": "0"}) and not is_first_on_node(SLURM)
    assert not is_first_on_node(TORCHRUN) and not is_first_on_node(MPI)


def test_torchrun_inside_an_srun_step_goes_by_slurms_job_where_it_has_no_id_of_its_own():
    assert named_run({}, {**TORCHRUN, **SLURM}) == "slurm-7-0"
    assert named_run({}, {**TORCHRUN, **SLURM, "TORCHELASTIC_RUN_ID": "mine"}) == "mine"


TYPED = ["src/train.py", "trainer=ddp", "tags=[a b]"]


@pytest.mark.parametrize(
    ("cluster", "gpus", "wanted"),
    [
        (Cluster("none", 1, 4, 0, None, "127.0.0.1", None), True, "python src/train.py trainer=ddp 'tags=[a b]'"),
        (
            Cluster("slurm", 2, 4, 0, 0, "node0", 29511), True,
            "srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("slurm", 2, 1, 0, 0, "node0", 29511), False,
            "srun --nodes=2 --ntasks-per-node=1 python src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("torchrun", 1, 2, 0, 0, "localhost", 41234), False,
            "torchrun --standalone --nproc-per-node=2 src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("torchrun", 2, 4, 0, 0, "10.0.0.1", 41234), True,
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 "
            "--nproc-per-node=4 src/train.py trainer=ddp 'tags=[a b]'",
        ),
        (
            Cluster("nodes", 2, 4, 0, None, "10.0.0.1", 29501), True,
            "MASTER_ADDR=10.0.0.1 MASTER_PORT=29501 WORLD_SIZE=8 NODE_RANK=0 "
            "python src/train.py trainer=ddp 'tags=[a b]'",
        ),
    ],
)  # fmt: skip
def test_the_command_names_what_launched_the_ranks(cluster, gpus, wanted):
    assert command_line(TYPED, cluster, gpus) == wanted


def test_gloo_takes_the_interface_towards_the_master_unless_the_user_chose(monkeypatch):
    monkeypatch.setattr("lockstep.launch.launchers.network_interface", lambda address: f"towards {address}")
    several = Cluster("torchrun", 2, 4, 1, 1, "10.0.0.1", 29500)
    for cluster, stated, wanted in (
        (several, None, "towards 10.0.0.1"),
        (several, "mine", "mine"),
        (Cluster("none", 1, 2, 0, 1, "10.0.0.1", 29500), None, "towards 127.0.0.1"),
        (Cluster("none", 1, 1, 0, 0, "127.0.0.1", None), None, None),
    ):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if stated:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", stated)
        set_rank_environment(cluster)
        assert environment().get("GLOO_SOCKET_IFNAME") == wanted and environment()["RANK"] == str(cluster.rank)
        assert environment()["GROUP_RANK"] == str(cluster.node_rank)


@pytest.mark.parametrize(("fast", "nodes", "wanted"), [(False, 2, "=eth7"), (True, 2, None), (False, 1, None)])
def test_nccl_takes_the_same_interface_where_there_is_no_infiniband(fast, nodes, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.launch.launchers.network_interface", lambda address: "eth7")
    monkeypatch.setattr("lockstep.launch.launchers.INFINIBAND", tmp_path)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if fast:
        (tmp_path / "efa_0").mkdir()
    set_rank_environment(Cluster("torchrun", nodes, 2, 0, 1, "10.0.0.1", 29500))
    assert environment().get("NCCL_SOCKET_IFNAME") == wanted


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_segments_expand_unless_the_user_says_otherwise(name, monkeypatch):
    if name:
        monkeypatch.setenv(name, "backend:native")
    set_rank_environment(Cluster("none", 1, 1, 0, 0, "127.0.0.1", None))
    found = {key: value for key, value in environment().items() if "ALLOC_CONF" in key}
    assert found == ({name: "backend:native"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

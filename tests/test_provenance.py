"""The command in a record: what was typed, behind what launched the ranks."""

import pytest

import provenance
from cluster import Cluster

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
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 --rdzv-id=lockstep "
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
    assert provenance.command(TYPED, cluster, gpus) == wanted

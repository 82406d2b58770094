"""What the ranks of a whole run send each other: no pickle, but for torch's own where it writes shards."""

import traceback
from functools import partial

import pytest
import torch.distributed as dist

from runs import run_door

SMALL = ["data=synthetic", "data.num_images=400", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer.num_threads=1", "trainer.max_epochs=2"]  # fmt: skip
COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
               "send_object_list", "recv_object_list")  # fmt: skip


def noted(path):
    """In the run's first process, from which its ranks are forked: write down who asks for a collective of objects."""

    def wrapped(name, real):
        def collective(*args, **kwargs):
            callers = [frame.filename.split("/site-packages/")[-1] for frame in traceback.extract_stack()[:-1]]
            with open(path, "a") as file:
                file.write(f"{name} {callers[-1]}\n")
            return real(*args, **kwargs)

        return collective

    for name in COLLECTIVES:
        setattr(dist, name, wrapped(name, getattr(dist, name)))


def pickles_of(tmp_path, *words):
    """{(collective, file that called it)} of a run."""
    path = tmp_path / "pickles.txt"
    done = run_door("train", *SMALL, *words, logs=tmp_path / "logs", before=partial(noted, str(path)))
    assert done.code == 0, done.output
    return {tuple(line.split()) for line in path.read_text().splitlines()} if path.exists() else set()


@pytest.mark.parametrize("trainer", ["fsdp_sim", pytest.param("ddp_sim", marks=pytest.mark.slow)])
def test_a_run_sends_none(tmp_path, trainer):
    assert pickles_of(tmp_path, f"trainer={trainer}") == set()


@pytest.mark.slow
def test_sharded_checkpoints_are_planned_by_torch_with_pickles(tmp_path):
    """After every rank has proved itself; SECURITY.md says so."""
    found = pickles_of(tmp_path, "trainer=fsdp_sim", "trainer.strategy.sharded_checkpoint=true")
    assert found == {
        (name, "torch/distributed/checkpoint/utils.py")
        for name in ("gather_object", "scatter_object_list", "broadcast_object_list")
    }

"""Checkpoints are read once for all ranks, and copied before training changes them."""

from pathlib import Path

import torch

from local_ranks import meet, run_ranks
from lockstep.callbacks.checkpoint_io import load_on_all_ranks, on_host, write_checkpoint
from lockstep.runs.errors import UserError


def loaded(cluster, folder):
    """Each rank has a folder of its own; only rank 0's holds the file."""
    meet(cluster)
    found, refused = load_on_all_ranks(Path(folder) / f"{cluster.rank}" / "x.ckpt"), []
    for name in ("torn.ckpt", "none.ckpt"):
        try:
            load_on_all_ranks(Path(folder) / f"{cluster.rank}" / name)
        except UserError as error:
            refused.append(str(error))
    return found["state_dict"]["w"].sum().item(), refused


def test_rank_zero_reads_a_checkpoint_for_all_ranks(tmp_path):
    state = {"w": torch.ones(20_000_000)}  # more than one message
    write_checkpoint({"state_dict": state}, tmp_path / "0" / "x.ckpt")
    (tmp_path / "0" / "torn.ckpt").write_bytes((tmp_path / "0" / "x.ckpt").read_bytes()[:-1000])
    results = run_ranks(loaded, 2, str(tmp_path))
    assert [total for total, _ in results] == [2e7, 2e7]
    for _, (torn, none) in results:
        assert "torn.ckpt is not a checkpoint that can be loaded" in torn and none.startswith("There is no checkp")


def test_the_copy_does_not_change_with_the_weights():
    weights = torch.arange(4.0)
    state = {"w": weights, "tied": weights[:], "plain": [1, {"a": 2}]}
    copied = on_host(state, always=True)
    weights.zero_()
    state["plain"][1]["a"] = 3
    assert copied["w"].tolist() == [0, 1, 2, 3] and copied["plain"] == [1, {"a": 2}]
    assert copied["tied"] is copied["w"]

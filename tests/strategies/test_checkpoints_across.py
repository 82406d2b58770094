"""A checkpoint written under any strategy and world size loads under any other."""

import pytest

from strategy_runs import adamw, difference, mean_losses, one, plain_sgd, ranks, sgd, worst

SAVED = {
    "one process": lambda path, **s: [one(save=path, **s)],
    "ddp, 2 ranks": lambda path, **s: ranks("ddp", 2, save=path, **s),
    "fsdp, 2 ranks": lambda path, **s: ranks("fsdp", 2, save=path, **s),
    "fsdp, 4 ranks, shards": lambda path, **s: ranks("fsdp", 4, save=path, own={"sharded_checkpoint": True}, **s),
}
LOADED = {
    "ddp, 2 ranks": ("ddp", 2),
    "allreduce, 3 ranks": ("allreduce", 3),
    "fsdp, 2 ranks": ("fsdp", 2),
    "fsdp, 3 ranks": ("fsdp", 3),
}


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("optimizer", [sgd, plain_sgd, adamw], ids=["sgd", "no state", "adamw"])
def test_saved_under_one_strategy_resumed_under_the_others(saved, optimizer, tmp_path):
    path = tmp_path / "epoch1.ckpt"
    SAVED[saved](path, optimizer=optimizer)
    whole = one(optimizer=optimizer, epochs=2)
    expected = {**whole, "losses": whole["losses"][6:]}
    names = LOADED if optimizer is adamw else ["fsdp, 3 ranks"]
    for name in names:
        strategy, world_size = LOADED[name]
        found = ranks(strategy, world_size, optimizer=optimizer, epochs=2, resume=path)
        assert difference(found, expected) < 1e-10, name
    assert difference([one(optimizer=optimizer, epochs=2, resume=path)], expected) < 1e-10


@pytest.mark.parametrize("saved", SAVED)
def test_saved_under_one_strategy_tested_under_another(saved, tmp_path):
    SAVED[saved](tmp_path / "last.ckpt")
    expected = one(test=True, resume=tmp_path / "last.ckpt")["test"]
    found = ranks("fsdp", 3, test=True, resume=tmp_path / "last.ckpt")[0]["test"]
    assert found == pytest.approx(expected, rel=1e-7)  # self.log keeps float32


@pytest.mark.parametrize("own", [{}, {"sharded_checkpoint": True}], ids=["file", "shards"])
def test_fsdp_saved_on_two_ranks_goes_on_bit_equal_on_two_and_close_on_four(own, tmp_path):
    run = {"precision": "32-true", "optimizer": adamw}
    path = tmp_path / "epoch1.ckpt"
    whole = ranks("fsdp", 2, epochs=2, **run)
    ranks("fsdp", 2, save=path, own=own, **run)
    two = ranks("fsdp", 2, epochs=2, resume=path, **run)
    assert worst(two[0]["weights"], whole[0]["weights"]) == 0
    assert mean_losses(two) == mean_losses(whole)[6:]
    four = ranks("fsdp", 4, epochs=2, resume=path, **run)
    assert mean_losses(four) == pytest.approx(mean_losses(whole)[6:], rel=1e-5)


def test_a_scaler_goes_from_ddp_names_to_fsdp(tmp_path):
    path = tmp_path / "scaled.ckpt"
    ranks("fsdp", 2, precision="16-mixed", overflow_at=2, save=path)
    found = ranks("fsdp", 2, precision="16-mixed", epochs=2, resume=path, inspect=scale)
    assert [r["inspect"] for r in found] == [32768.0, 32768.0]


def scale(trainer):
    return trainer.precision_plugin.scaler.get_scale()

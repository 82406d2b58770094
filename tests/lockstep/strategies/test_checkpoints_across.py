"""A checkpoint written under any strategy and world size loads under any other."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from strategy_runs import (
    adamw,
    difference,
    mean_losses,
    one,
    plain_sgd,
    ranks,
    ranks_all,
    scale,
    sgd,
    worst,
)

SAVED = {
    "one process": lambda path, **s: [one(save=path, **s)],
    "ddp, 2 ranks": lambda path, **s: ranks("ddp", 2, save=path, **s),
    "fsdp, 2 ranks": lambda path, **s: ranks("fsdp", 2, save=path, **s),
    "fsdp, 4 ranks": lambda path, **s: ranks("fsdp", 4, save=path, **s),
}
LOADED = {2: ["ddp", "fsdp"], 3: ["allreduce", "fsdp"]}


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(sgd, marks=pytest.mark.slow), plain_sgd, adamw],
    ids=["sgd", "no state", "adamw"],
)
def test_saved_under_one_strategy_tested_and_resumed_under_the_others(saved, optimizer, tmp_path):
    path = tmp_path / "epoch1.ckpt"
    SAVED[saved](path, optimizer=optimizer)
    more = {"optimizer": optimizer, "epochs": 2}
    whole = one(**more)
    expected = {**whole, "losses": whole["losses"][6:]}
    test_loss = one(test=True, resume=path)["test"]
    assert difference([one(resume=path, **more)], expected) < 1e-10
    for world_size, names in (LOADED if optimizer is adamw else {3: ["fsdp"]}).items():
        tests = [(name, {"test": True, "resume": path}) for name in names]
        fits = [(name, {"resume": path, **more}) for name in names]
        results = ranks_all(world_size, tests + fits)
        for found in results[: len(tests)]:
            assert found[0]["test"] == pytest.approx(test_loss, rel=1e-7)  # self.log keeps float32
        for found in results[len(tests) :]:
            assert difference(found, expected) < 1e-10


@pytest.mark.slow
def test_fsdp_saved_on_two_ranks_resumes_on_two_and_four(tmp_path):
    run = {"precision": "32-true", "optimizer": adamw}
    path = tmp_path / "epoch1.ckpt"
    runs = [{"epochs": 2}, {"save": path}, {"epochs": 2, "resume": path}]
    whole, _, two = ranks_all(2, [("fsdp", {**run, **settings}) for settings in runs])
    assert worst(two[0]["weights"], whole[0]["weights"]) == 0
    assert mean_losses(two) == mean_losses(whole)[6:]
    four = ranks("fsdp", 4, epochs=2, resume=path, **run)
    assert mean_losses(four) == pytest.approx(mean_losses(whole)[6:], rel=1e-5)


def test_fsdp_stores_its_loss_scale_under_the_name_of_ddps(tmp_path):
    path = tmp_path / "scaled.ckpt"
    scaled = {"precision": "16-mixed", "inspect": scale}
    runs = [{"overflow_at": 2, "save": path}, {"epochs": 2, "resume": path}]
    _, resumed = ranks_all(2, [("fsdp", {**scaled, **run}) for run in runs])
    # An overflow halves the first scale of 65536.
    assert [result["inspect"] for result in resumed] == [32768.0, 32768.0]
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[MixedPrecision.__qualname__]["scale"] == 32768.0

"""The recipes of configs/experiment that take hours or GPUs: two steps of each, on a few small images on a CPU."""

import json

import pytest

from lockstep.config.compose import compose, plain
from runs import run_door

TWO_STEPS = [
    "data=synthetic", "data.num_images=24", "data.num_test_images=6", "data.num_val=6", "data.global_batch_size=8",
    "data.num_workers=0", "data.image_size=64", "trainer=cpu", "trainer.max_epochs=1", "logbook=null",
    "trainer.accumulate_grad_batches=1", "trainer.num_threads=2", "~callbacks.hardware", "run_id=r",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("deit3_imagenet", []),
        ("convnext_imagenet", []),
        ("resnet50_a2", []),
        ("linear_probe", ["model.pretrained=false"]),
    ],
)
def test_two_steps_of_a_recipe(tmp_path, experiment, words):
    done = run_door("train", f"experiment={experiment}", *TWO_STEPS, *words, logs=tmp_path)
    assert done.code == 0, done.output
    assert done.record["steps"] == 2 and done.record["metrics"]["test/images"] == 6
    assert done.record["experiment"] == experiment and done.record["data"] in ("synthetic", "imagenet", "cifar10")
    trained, there = done.record["num_trained_parameters"], done.record["num_parameters"]
    assert trained == (1280 + 1) * 10 if experiment == "linear_probe" else trained == there


def test_what_a_recipe_takes_from_its_source():
    """The values that its paper or repository states, as they are composed."""
    root = ["data.root=x"]
    deit = plain(compose("train", ["experiment=deit3_imagenet", *root]))
    own = deit["optimizer"]
    assert (own["opt"], own["lr"], own["weight_decay"]) == ("lamb", 4e-3, 0.05)
    assert (deit["augmentation"]["color_jitter"], deit["augmentation"]["mixup_alpha"]) == ([0.3, 0.3, 0.3], 0.8)
    assert (deit["data"]["global_batch_size"], deit["trainer"]["max_epochs"], deit["loss"]["target_threshold"]) == (
        2048, 800, 0.0,
    )  # fmt: skip
    convnext = plain(compose("train", ["experiment=convnext_imagenet", *root]))
    assert (convnext["optimizer"]["lr"], convnext["scheduler"]["warmup_epochs"], convnext["trainer"]["ema_decay"]) == (
        4e-3, 20, 0.9999,
    )  # fmt: skip
    assert (convnext["data"]["global_batch_size"], convnext["loss"]["label_smoothing"]) == (4096, 0.1)
    a2 = plain(compose("train", ["experiment=resnet50_a2", *root]))
    own = a2["optimizer"]
    assert (own["lr"], own["weight_decay"], a2["augmentation"]["mixup_alpha"]) == (5e-3, 0.02, 0.1)
    assert (a2["data"]["crop_pct"], a2["model"]["drop_path_rate"], a2["loss"]["target_threshold"]) == (0.95, 0.05, 0.2)


@pytest.mark.slow
def test_the_folds_of_a_sweep_are_averaged_at_its_end(tmp_path):
    done = run_door(
        "train", "-m", "experiment=kfold", "data.num_folds=3", "data.fold=0,1,2", "trainer.max_epochs=2",
        f"hydra.sweep.dir={tmp_path}/train/multiruns/s", "~callbacks.hardware", logs=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.output
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("train/multiruns/s/*/run.json"))]
    assert [record["num_val"] for record in records] == [479] * 3 and {r["num_train"] for r in records} == {958}
    values = [record["metrics"]["test/acc"] for record in records]
    said = next(line for line in done.output.splitlines() if "test/acc" in line and "±" in line)
    assert f"test/acc {sum(values) / 3:.2%} ± " in said and "3 jobs" in said

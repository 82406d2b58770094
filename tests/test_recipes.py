"""The recipes of configs/experiment that take hours or GPUs: two steps of each, on a few small
images on a CPU.
"""

import json

import pytest

from lockstep.config.compose import compose, plain
from lockstep.records.config import flatten
from runs import succeed

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
    done = succeed("train", f"experiment={experiment}", *TWO_STEPS, *words, logs=tmp_path)
    assert done.record["steps"] == 2 and done.record["metrics"]["test/images"] == 6
    assert done.record["experiment"] == experiment and done.record["data"] in (
        "synthetic",
        "imagenet",
        "cifar10",
    )
    trained, there = done.record["num_trained_parameters"], done.record["num_parameters"]
    assert trained == (1280 + 1) * 10 if experiment == "linear_probe" else trained == there


SOURCES = {  # what the paper or repository of a recipe states
    "deit3_imagenet": {
        "optimizer.opt": "lamb", "optimizer.lr": 4e-3, "optimizer.weight_decay": 0.05,
        "augmentation.color_jitter": [0.3, 0.3, 0.3], "augmentation.mixup_alpha": 0.8, "data.global_batch_size": 2048,
        "trainer.max_epochs": 800, "loss.target_threshold": 0.0,
    },
    "convnext_imagenet": {
        "optimizer.lr": 4e-3, "scheduler.warmup_epochs": 20, "trainer.ema_decay": 0.9999,
        "data.global_batch_size": 4096, "loss.label_smoothing": 0.1,
    },
    "resnet50_a2": {
        "optimizer.lr": 5e-3, "optimizer.weight_decay": 0.02, "augmentation.mixup_alpha": 0.1, "data.crop_pct": 0.95,
        "model.drop_path_rate": 0.05, "loss.target_threshold": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("experiment", SOURCES)
def test_a_recipe_composes_what_its_source_states(experiment):
    found = flatten(plain(compose("train", [f"experiment={experiment}", "data.root=x"])))
    assert {key: found[key] for key in SOURCES[experiment]} == SOURCES[experiment]


def test_folds_bring_no_values_of_another_recipe():
    composed = plain(compose("train", ["experiment=kfold", "data=digits"]))
    default = plain(compose("train", ["data=digits"]))
    assert (composed["data"]["fold"], composed["data"]["num_folds"]) == (0, 5)
    assert composed["logbook"] is None
    assert {key: composed[key] for key in ("model", "optimizer", "trainer")} == {
        key: default[key] for key in ("model", "optimizer", "trainer")
    }


@pytest.mark.slow
def test_the_folds_of_a_sweep_are_averaged_at_its_end(tmp_path):
    done = succeed(
        "train", "-m", "experiment=kfold", "data=digits", "model=small_cnn", "trainer=cpu", "data.num_folds=3", "data.fold=0,1,2",
        "trainer.max_epochs=2",
        f"hydra.sweep.dir={tmp_path}/train/multiruns/s", "~callbacks.hardware", logs=tmp_path,
    )  # fmt: skip
    records = [
        json.loads(path.read_text())
        for path in sorted(tmp_path.glob("train/multiruns/s/*/run.json"))
    ]
    assert [record["num_val"] for record in records] == [479] * 3 and {
        r["num_train"] for r in records
    } == {958}
    values = [record["metrics"]["test/acc"] for record in records]
    line = next(line for line in done.output.splitlines() if "of 3 folds" in line)
    assert f"test/acc {sum(values) / 3:.2%} ± " in line

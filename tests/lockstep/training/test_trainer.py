"""Limits and intervals in whole steps.

Every argument of Lightning's Trainer works, or one sentence refuses it.
"""

import inspect
import re

import lightning.pytorch as pl
import pytest
import torch

from local_ranks import run_ranks
from lockstep.config.compose import compose, plain
from lockstep.config.instantiate import build
from lockstep.config.schema import REFUSED_TRAINER_KEYS, trainer_arguments
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.ranks.process_group import create_process_group
from lockstep.training.trainer import agree_on_precision, round_to_whole_steps, validation_interval
from runs import run_script, succeed


@pytest.mark.parametrize(
    ("limit", "batches", "accumulate", "wanted"),
    [
        (1.0, 40, 4, 1.0),
        (10, 40, 4, 8),
        (0.25, 40, 4, 8),
        (100, 40, 4, 100),
        (3, 40, 1, 3),
        (0, 4, 4, 0),
    ],
)
def test_an_epoch_ends_with_a_whole_step(limit, batches, accumulate, wanted):
    assert round_to_whole_steps(limit, batches, accumulate) == wanted


@pytest.mark.parametrize(
    ("stated", "batches", "accumulate", "wanted"),
    [
        (1.0, 20, 1, 1.0), (0.25, 20, 1, 5), (0.25, 40, 2, 10), (0.3, 20, 1, 6), (0.25, 10, 1, 3), (0.1, 30, 1, 3),
        (0.001, 20, 2, 2), (5, 20, 1, 5), (5, 20, 4, 1.0), (5, 24, 4, 20), (1, 20, 2, 2), (20, 20, 1, 1.0),
        (1.0, 0, 1, 1.0),
    ],
)  # fmt: skip
def test_lightning_gets_an_interval_in_micro_batches(stated, batches, accumulate, wanted):
    found = validation_interval(stated, batches, accumulate)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(("share", "accumulate"), [(0.001, 1), (0.01, 4)])
def test_a_share_of_no_batch_is_refused(share, accumulate):
    with pytest.raises(UserError, match=f"leaves 0 micro-batches.* give at least {accumulate}"):
        round_to_whole_steps(share, 30, accumulate)


def test_overfitting_on_a_share_of_no_batch_is_refused(tmp_path):
    words = ["data=synthetic", "data.num_images=500", "model=small_cnn", "trainer=cpu"]
    done = run_script("train", *words, "trainer.overfit_batches=0.001", logs=tmp_path)
    assert done.code == 2 and "overfit_batches=0.001 leaves no batch" in done.output


def test_a_wrong_limit_or_interval_is_refused():
    with pytest.raises(
        UserError, match="leaves 3 micro-batches and a step takes 4: give at least 4"
    ):
        round_to_whole_steps(3, 40, 4)
    for stated in (0, 0.0, 1.5, 11, -1, True, "often", "00:00:15:00"):
        with pytest.raises(
            UserError, match="trainer.val_check_interval=.* from 1 to 10, which is an epoch"
        ):
            validation_interval(stated, 20, 2)


WORKS = {
    "accelerator": "cpu", "strategy": None, "devices": 1, "num_nodes": 1, "precision": "32-true", "max_epochs": 2,
    "min_epochs": 1, "max_steps": 4, "min_steps": 1, "max_time": "1h", "limit_train_batches": 3,
    "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1, "overfit_batches": 0.0,
    "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "num_sanity_val_steps": 1, "log_every_n_steps": 1,
    "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value", "deterministic": "warn",
    "benchmark": False, "inference_mode": False, "profiler": "pytorch", "detect_anomaly": True, "sync_batchnorm": True,
    "plugins": "[]", "reload_dataloaders_every_n_epochs": 0, "use_distributed_sampler": True, "model_registry": None,
    "enable_autolog_hparams": True,
}  # fmt: skip


@pytest.mark.slow
def test_all_of_them_in_one_run(tmp_path):
    words = [
        f"trainer.{name}={'null' if value is None else value}" for name, value in WORKS.items()
    ]
    done = succeed("train", "data=digits", "data.global_batch_size=64", "model=small_cnn", *words, "run_id=r",
                    logs=tmp_path)  # fmt: skip
    assert done.record["steps"] == 2 and list(done.folder.path.glob("fit-profile*.json"))


PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text().split("\n## timm")[0]


def test_the_trainers_arguments_are_those_of_its_signature():
    assert trainer_arguments() == tuple(inspect.signature(pl.Trainer).parameters)


def test_the_others_are_refused_with_what_to_use():
    names = inspect.signature(pl.Trainer).parameters.keys()
    assert names == WORKS.keys() | REFUSED_TRAINER_KEYS.keys()
    assert (
        dict(re.findall(r"^\| `(\w+)` \| (use .*) \|$", PAGE, re.MULTILINE)) == REFUSED_TRAINER_KEYS
    )
    assert all(f"`{name}`" in PAGE for name in WORKS)
    for name, said in list(REFUSED_TRAINER_KEYS.items())[:2]:
        with pytest.raises(UserError, match=f"trainer.{name} cannot be given: ") as refused:
            compose("train", [f"trainer.{name}=true"])
        assert said in str(refused.value)


COMMANDS = PAGE.split("as they are typed there")[1].split("Every argument")[0]
README = re.findall(r"^\| `([^`]+)` \| (.*) \|$", COMMANDS, re.MULTILINE)


@pytest.mark.parametrize(("words", "result"), README)
def test_a_command_of_the_templates_readme_does_as_promised(words, result):
    def built():
        config = plain(compose("train", words.split()))
        node = {
            key: value
            for key, value in config["model"].items()
            if key not in ("freeze", "pretrained", "name")
        }
        build({**node, "_partial_": True})  # the net's options, without the net

    if result == "works":
        return built()
    with pytest.raises(UserError, match=re.escape(result)):
        built()


def precision_here(place):
    create_process_group(place, torch.device("cpu"), 30.0)
    torch.cuda.is_bf16_supported = lambda **_: place.rank == 0
    return agree_on_precision("auto", is_gpu=True, scales_losses=True)


def test_ranks_on_unlike_gpus_train_in_one_precision():
    assert run_ranks(precision_here, 2) == ["16-mixed", "16-mixed"]

"""Every argument of Lightning's Trainer is trainer.NAME=VALUE, or one sentence says what to use instead."""

import inspect

import lightning.pytorch as pl
import pytest

from lockstep.config.compose import compose
from lockstep.config.schema import REFUSED_TRAINER_KEYS
from lockstep.runs.errors import UserError
from runs import run_door

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


def test_all_of_them_in_one_run(tmp_path):
    words = [f"trainer.{name}={'null' if value is None else value}" for name, value in WORKS.items()]
    done = run_door("train", "data=digits", "data.global_batch_size=64", "model=small_cnn", *words, "run_id=r",
                    logs=tmp_path)  # fmt: skip
    assert done.code == 0, done.output
    assert (
        done.record["steps"] == 2
        and (done.folder.path / "fit-profile.pt.trace.json").exists()
        or list(done.folder.path.glob("*.json"))
    )


def test_the_others_are_refused_with_what_to_use():
    names = inspect.signature(pl.Trainer).parameters.keys()
    assert names == WORKS.keys() | REFUSED_TRAINER_KEYS.keys()
    for name, said in REFUSED_TRAINER_KEYS.items():
        with pytest.raises(UserError, match=f"trainer.{name} cannot be given: ") as refused:
            compose("train", [f"trainer.{name}=true"])
        assert said in str(refused.value)

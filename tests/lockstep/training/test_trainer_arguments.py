"""Every argument of Lightning's Trainer is trainer.NAME=VALUE, or one sentence says what to use instead."""

import inspect
import re

import lightning.pytorch as pl
import pytest

from lockstep.config.compose import compose, plain
from lockstep.config.instantiate import build
from lockstep.config.schema import REFUSED_TRAINER_KEYS
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY
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


@pytest.mark.slow
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


PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text().split("\n## timm")[0]


def test_the_others_are_refused_with_what_to_use():
    names = inspect.signature(pl.Trainer).parameters.keys()
    assert names == WORKS.keys() | REFUSED_TRAINER_KEYS.keys()
    assert dict(re.findall(r"^\| `(\w+)` \| (use .*) \|$", PAGE, re.MULTILINE)) == REFUSED_TRAINER_KEYS
    assert all(f"`{name}`" in PAGE for name in WORKS)
    for name, said in REFUSED_TRAINER_KEYS.items():
        with pytest.raises(UserError, match=f"trainer.{name} cannot be given: ") as refused:
            compose("train", [f"trainer.{name}=true"])
        assert said in str(refused.value)


COMMANDS = PAGE.split("as they are typed there")[1].split("Every argument")[0]
README = re.findall(r"^\| `([^`]+)` \| (.*) \|$", COMMANDS, re.MULTILINE)


@pytest.mark.parametrize(("words", "result"), README)
def test_a_command_of_the_templates_readme_works_or_is_refused_as_the_page_says(words, result):
    def built():
        config = plain(compose("train", words.split()))
        node = {key: value for key, value in config["model"].items() if key not in ("freeze", "pretrained", "name")}
        build({**node, "_partial_": True})  # the net's options, without the net

    if result == "works":
        return built()
    with pytest.raises(UserError, match=re.escape(result)):
        built()

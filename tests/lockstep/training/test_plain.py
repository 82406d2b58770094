"""Modules of other projects train, and a finished run's data and module come back in a notebook."""

import csv
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from augmentations.policies import RandAugment
from lockstep.checkpoints.files import newest_whole
from lockstep.checkpoints.io import write_checkpoint
from lockstep.checkpoints.load import read_checkpoint
from lockstep.process.errors import UserError
from lockstep.training.inference import load_data
from runs import run_script, succeed

PLAIN = ("task._target_=plain_task.Regression", "data._target_=plain_task.Numbers", "trainer.max_epochs=3",
         "callbacks.checkpoints.monitor=val_loss", "callbacks.checkpoints.mode=min", "trainer.num_threads=1",
         "trainer.log_every_n_steps=5", "run_id=r")  # fmt: skip


@pytest.mark.parametrize(
    "trainer", ["cpu", pytest.param("ddp_sim", marks=pytest.mark.slow), "fsdp_sim"]
)
def test_plain_modules_train_test_and_resume(trainer, tmp_path):
    done = succeed(
        "train", *PLAIN, f"trainer={trainer}", "+task.width=8", "+data.rows=320", logs=tmp_path
    )
    assert "resume exact, in mid-epoch by reading" in done.output.splitlines()[0]
    assert "Resume is exact: the training loader has no state_dict" in done.output
    record = done.record
    ranks = 1 if trainer == "cpu" else 2
    assert record["status"] == "finished" and record["steps"] == 3 * 320 // (16 * ranks)
    assert record["num_parameters"] == 4 * 8 + 8 + 8 + 1
    assert "run r · Regression · Numbers · " in done.output and record["model"] == "Regression"
    assert (
        record["global_batch_size"] is None and "Global batch" not in done.folder.page.read_text()
    )
    assert 0 < record["metrics"]["val_loss_best"] < 4 and 0 < record["metrics"]["test_loss"] < 4
    assert (
        done.folder.path / record["best_checkpoint"]["path"]
    ).exists() and done.folder.page.exists()
    with done.folder.metrics.open() as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) == record["steps"] and float(rows[-1]["train/loss"]) < float(
        rows[0]["train/loss"]
    )
    assert rows[-1]["val_loss"]
    last = read_checkpoint(newest_whole(done.folder.checkpoints, kind="last"))
    states = [state["torch"] for state in last["lockstep"]["random"]]
    # Dropout differs between ranks.
    assert len(states) == ranks and (ranks == 1 or not torch.equal(*states))
    if (
        trainer == "cpu"
    ):  # on any machine: on one without a GPU the refusal of the default training is not for them
        again = succeed("train", "resume=r", "trainer.max_epochs=5", logs=tmp_path).record
        assert again["steps"] == 100 and again["restarts"][0]["resumed_step"] == 60


@pytest.mark.slow
def test_a_random_split_is_the_same_in_training_and_evaluation(tmp_path):
    words = [*PLAIN, "data._target_=plain_task.RandomSplit", "trainer=cpu"]
    trained = succeed("train", *words, logs=tmp_path)
    evaluated = succeed("eval", "ckpt_path=r", logs=tmp_path)
    splits = re.findall(r"split \[.*\]", trained.output + evaluated.output)
    assert len(splits) >= 3 and len(set(splits)) == 1, splits
    name = "test_loss"
    assert trained.record["metrics"][name] == evaluated.record["metrics"][name]


def test_a_module_whose_hooks_make_layers_resumes(tmp_path):
    words = ["task._target_=plain_task.Late", "trainer=cpu", "trainer.accumulate_grad_batches=3"]
    done = succeed("train", *PLAIN, *words, "+data.rows=320", logs=tmp_path)
    assert (
        done.record["num_parameters"] == 4 * 16 + 16 + 16 + 1 + 4 * 4 + 4
        and done.record["steps"] == 3 * 7
    )

    again = succeed("train", "resume=r", "trainer.max_epochs=5", logs=tmp_path).record
    assert again["steps"] == 5 * 7
    tested = succeed("eval", "ckpt_path=r", logs=tmp_path).record
    assert tested["metrics"]["test_loss"] == pytest.approx(again["metrics"]["test_loss"], rel=1e-6)


def test_callbacks_of_lightning_work_beside_lockstep_s(tmp_path):
    """Its own checkpoints, progress bar, summary, learning rates and early stopping."""
    own = "{_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/acc, mode: max, "
    own += f"dirpath: {tmp_path}/own}}"
    done = succeed(
        "train", "experiment=quickstart", "trainer.max_epochs=2", "trainer.log_every_n_steps=5", "trainer=cpu",
        "callbacks=[early_stopping,lr_monitor,model_summary,rich_progress_bar]", f"+callbacks.own={own}", logs=tmp_path,
    )  # fmt: skip
    assert done.record["status"] == "finished", done.output
    assert (
        len(list((tmp_path / "own").glob("*.ckpt"))) == 1 and done.record["best_checkpoint"]["path"]
    )
    assert (
        "Total params" in done.output and "lr-" in done.folder.metrics.read_text().splitlines()[0]
    )


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_with_unequal_numbers_of_batches_are_told_so(accumulate, tmp_path):
    streams = ["data._target_=plain_task.Streams", "trainer=ddp_sim", "trainer.timeout_s=10"]
    accumulation = f"trainer.accumulate_grad_batches={accumulate}"
    done = run_script(
        "train", *PLAIN, *streams, accumulation, "trainer.max_epochs=2", logs=tmp_path
    )
    said = done.output.strip().splitlines()[-1]
    assert (
        done.code == 2
        and "Rank 1 has had 10 training batches in epoch 1, rank 0 at least 1" in said
    ), done.output
    assert "trainer.limit_train_batches=10" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"], "name its network self.net, or choose"),
        (["trainer=cpu", "callbacks.checkpoints.monitor=val_los"], "there are val_loss"),
        pytest.param(["task._target_=plain_task.Unused", "trainer=ddp_sim"], "find_unused_parameters=true",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_sentence(words, said, tmp_path):
    done = run_script("train", *PLAIN, *words, logs=tmp_path)
    assert done.code == 2 and said in done.output.strip().splitlines()[-1], done.output


TEMPLATE = {
    "task": """# Digits
_target_: template_task.DigitsModule
monitor: val/acc
mode: max
net: {_target_: template_task.DenseNet, input_size: 64, hidden: 64, output_size: 10}
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.005, weight_decay: 0.0}
scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 10}
compile: false
""",
    "data": "# Digits\n_target_: template_task.DigitsData\nbatch_size: 64\nnum_workers: 0\npin_memory: false\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", pytest.param("fsdp_sim", marks=pytest.mark.slow)])
def test_a_template_style_module_runs_by_config_alone(trainer, tmp_path):
    for group, text in TEMPLATE.items():
        (tmp_path / "configs" / group).mkdir(parents=True)
        (tmp_path / "configs" / group / "template.yaml").write_text(text)
    words = ["task=template", "data=template", "--config-dir", str(tmp_path / "configs"), f"trainer={trainer}",
             "trainer.max_epochs=3", "trainer.num_threads=1", "task.optimizer.lr=0.01", "run_id=t"]  # fmt: skip
    done = succeed("train", *words, logs=tmp_path)
    record = done.record
    assert (record["model"], record["data"]) == ("DigitsModule", "template")
    assert record["metrics"]["val/acc_best"] > 0.9 and record["metrics"]["test/acc"] > 0.9
    evaluated = succeed("eval", "ckpt_path=t", logs=tmp_path)
    assert evaluated.record["metrics"]["test/acc"] == pytest.approx(record["metrics"]["test/acc"])
    resumed = succeed("train", "resume=t", "trainer.max_epochs=4", logs=tmp_path)
    assert resumed.record["epochs"] == 4, resumed.output


# A run's data in a notebook: the images that the run saw; of a checkpoint from elsewhere words and
# numbers.


def save_first_batch(path: Path) -> None:
    """Make the run write its first training batch, as its training step gets it."""
    from lightning.pytorch import LightningModule

    def save(module, batch, index):
        if module.global_step == index == 0:
            torch.save(batch, path)

    LightningModule.on_train_batch_start = save


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    for name, level in (("dark", 40), ("light", 200)):
        (place / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng([level, number]).integers(
                0, level, (12, 12, 3), np.uint8
            )
            Image.fromarray(pixels).save(place / "images" / name / f"{number}.png")
    words = [f"data.root={place / 'images'}", "data.image_size=8", "data.global_batch_size=8", "data.num_workers=1",
             "augmentation=rand_augment", "augmentation.num_ops=1", "augmentation.mixup_alpha=0.5", "seed=3",
             "model=small_cnn", "trainer=cpu", "trainer.max_steps=2", "run_id=r"]  # fmt: skip
    done = succeed(
        "train",
        "data=image_folder",
        *words,
        logs=place,
        before=partial(save_first_batch, place / "batch.pt"),
    )
    return done


def first_batch(data):
    return data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)


def same_batch(batch, run):
    return all(map(torch.equal, batch, torch.load(run.logs / "batch.pt")))


def test_the_first_batch_is_the_runs_own_to_the_bit(run):
    batch = first_batch(load_data("r", run.logs))
    assert same_batch(batch, run) and (batch[0].shape, batch[1].shape) == ((8, 3, 8, 8), (8, 2))
    data = load_data("r", run.logs, global_batch_size=6, seed=4)
    assert (
        first_batch(data)[0].shape == (6, 3, 8, 8) and data.augmentation.mixing.mixup_alpha == 0.5
    )
    assert data.options.seed == 4


def test_a_foreign_checkpoint_chooses_no_code_and_no_place(run, tmp_path):
    """Its augmentation and seed are names and numbers, which count."""
    canary, theirs, logs = tmp_path / "canary", str(tmp_path / "theirs.ckpt"), tmp_path / "logs"
    checkpoint = read_checkpoint(run.folder.path / run.record["best_checkpoint"]["path"])
    write_checkpoint(checkpoint, Path(theirs))
    with pytest.raises(UserError, match="data.root= is missing"):
        load_data(theirs, logs)
    here = {"root": run.logs / "images", "cache_dir": tmp_path / "cache"}
    assert same_batch(first_batch(load_data(theirs, logs, **here)), run)
    config = checkpoint["lockstep"]["config"]
    config["data"].update(_target_="os.mkdir", path=str(canary), cache_dir=str(canary))
    config["augmentation"] = {"_target_": "os.mkdir", "path": str(canary)}
    write_checkpoint(checkpoint, Path(theirs))
    data = load_data(theirs, logs, **here)
    assert isinstance(data.augmentation, RandAugment)  # as the config's choices name it
    assert not canary.exists() and data.num_train == 32

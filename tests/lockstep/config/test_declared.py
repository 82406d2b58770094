"""A key that nothing reads is refused with the nearest that something does, however it is written."""

import shutil

import pytest

from lockstep.config import compose as module
from lockstep.config.compose import CONFIGS, compose, run_script
from lockstep.config.help import groups
from lockstep.runs.errors import UserError

WRONG = {
    "batch_size=16": "take data.global_batch_size.",
    "trainer.gpus=2": "take trainer.devices.",
    "gpus=2": "take trainer.devices.",
    "lr=0.1": "take optimizer.lr.",
    "optimizer.learning_rate=1": "take optimizer.lr.",
    "epochs=5": "take trainer.max_epochs.",
    "workers=2": "take data.num_workers.",
    "data.batch_size=4": "take data.global_batch_size.",
    "trainer.max_epoch=5": "take trainer.max_epochs.",
    "max_epochs=5": "take trainer.max_epochs.",
    "drop_out=0.1 model=small_cnn": "take model.dropout.",
    "optimizer.momentun=0.9": "take optimizer.momentum (optimizer=muon or optimizer=sgd).",
    "data.root=/images data=digits": "data=csv or data=fashion_mnist or data=image_folder has it.",
    "optimizer.amsgrd=true": "take optimizer.amsgrad.",  # a parameter that no yaml names
    "trainer.barebone=true": "take trainer.barebones.",  # of Lightning's Trainer
    "trainer.fast_dev_run=true": "take debug=fast_dev_run.",
    "callbacks.checkpoints.moniter=x": "take callbacks.checkpoints.monitor.",
    "trainer.strategy.bucket_cap_mb=1": "choose a trainer whose strategy has it, as trainer=ddp.",
    "trainer.strategy.static_grph=1 trainer=ddp": "choose a trainer whose strategy has it",
    "callbacks.mine=3": "a new one is written '+callbacks.mine={_target_: …}'.",
    "callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStopping +callbacks.mine.patiense=3": "callbacks.mine",
    "optimiser=sgd": "take optimizer=.",
}
ALSO_WRONG = {
    "trainer.strategy=ddp": "strategies are chosen as trainer=ddp",
    "model=resnet50": "any model of timm is model=timm model.name=resnet50",
    "augmentation=cutmix": "take augmentation.cutmix_alpha=… (put a rectangle",
    "augmentation=mixup": "take augmentation.mixup_alpha=… (",
    "augmentation=erasing": "take augmentation.erasing_prob=… (",
    "augmentation=jitter": "take augmentation.color_jitter=… (",
    "trainer=gpus": "did you mean trainer=gpu?",
    "metrics=auroc": "'+metrics.auroc={_target_: torchmetrics.AUROC, task: multiclass}'",
    "metrics=[f1,kapa]": "There is no metrics=kapa: did you mean metrics=kappa?",
    "optimizer.amsgrad=true": "write +optimizer.amsgrad=VALUE.",
    "optimizer=adamW": "did you mean optimizer=adamw?",
    "optimizer=SGD": "did you mean optimizer=sgd?",
    "model=alexnett": "did you mean model=alexnet?",
    "experiment=quickstat": "did you mean experiment=quickstart?",
    "callbacks=[]": "callbacks=none leaves them out",
    "~callbacks": "callbacks=none leaves them out",
    "~callbacks.checkpoint": "take callbacks.checkpoints.",
    "~scheduler": "scheduler=none leaves it out",
    "~model": "nothing trains without",
    "~seed": "give it another value, seed=VALUE",
    "~trainer.max_epochs": "trainer.max_epochs=VALUE",
    "fsdp": "write trainer=fsdp.",
    "trainer.max_epochs": "write trainer.max_epochs=VALUE.",
    "recipe=quickstart": "take experiment=.",
    "classifier=3": "classifier has keys of its own, as classifier._target_",
}
RIGHT = [
    "trainer=ddp +trainer.strategy.find_unused_parameters=true",
    "+trainer.strategy={_target_: lockstep.strategies.ddp.DDP, static_graph: true}",
    "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 3}",
    "+logger.more={_target_: lightning.pytorch.loggers.CSVLogger, save_dir: x}",
    "+optimizer.amsgrad=true",
    "+trainer.detect_anomaly=true",
    "++hardware.peak_tflops={float32: 8}",
    "optimizer=sgd optimizer.momentum=0",
    "data=image_folder data.root=/x data.mean=[0.1,0.2,0.3]",
    "data.global_batch_size=max",
    "scheduler=none",
]


OFTEN = [("+", "batch_size=16"), *(("", words) for words in WRONG)]
SIGNED = [(sign, words) for words in WRONG for sign in ("", "+", "++")]


@pytest.mark.parametrize(
    ("sign", "words"), [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in SIGNED]
)
def test_a_key_that_nothing_reads_is_refused_with_the_nearest(sign, words):
    with pytest.raises(UserError) as refused:
        compose("train", f"{sign}{words}".split())
    assert WRONG[words] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("word", ALSO_WRONG)
def test_what_is_meant_otherwise_is_said(word):
    with pytest.raises(UserError) as refused:
        compose("train", [word])
    assert ALSO_WRONG[word] in str(refused.value)


@pytest.mark.parametrize("words", RIGHT)
def test_what_something_reads_passes(words):
    compose("train", [words] if "{" in words else words.split())


@pytest.mark.slow
@pytest.mark.parametrize("word", [f"{g}={o.name}" for g, found in groups(CONFIGS).items() for o in found])
def test_every_option_that_came_along_passes(word):
    if not word.startswith(("hydra=", "paths=")):
        compose("train", [word])


def test_a_key_in_an_experiment_is_refused_too(tmp_path, monkeypatch):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: alexnet\nmodel: {dropuot: 0.1}\n"
    )
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    with pytest.raises(UserError, match=r"take model.dropout. It stands in the experiment's yaml."):
        compose("train", ["experiment=mine", "seed=1"])


def test_a_key_that_ones_own_yaml_does_not_list_is_given_with_a_plus(tmp_path, monkeypatch):
    """Others list it; the class of this one has it too."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/augmentation/mine.yaml").write_text("_target_: lockstep.data.augmentation.CropFlip\n")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    with pytest.raises(UserError, match=r"yaml does not list: write \+augmentation.cutmix_alpha=VALUE.$"):
        compose("train", ["augmentation=mine", "augmentation.cutmix_alpha=1"])
    assert compose("train", ["augmentation=mine", "+augmentation.cutmix_alpha=1"]).augmentation.cutmix_alpha == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--epochs", "5"], "written without dashes: trainer.max_epochs=5."),
        (["--lr=0.1"], "written without dashes: optimizer.lr=0.1."),
        (["--config-name", "mine"], "a recipe is chosen as experiment=NAME"),
        (["--seed", "3"], "written without dashes: seed=3."),
        (["--estimate", "seed=3"], "python src/find_batch_size.py --estimate, with the same options."),
        (["-m", "batch_size=16,32"], "take data.global_batch_size."),
        (["-m", "model=small_cnn,airbench", "seed=1,2", "model.widths=[1]"], "model=airbench has it."),
        (["-m", "model=glob(alex*)", "model.dropuot=0.1"], "take model.dropout."),
        (["-m", "hydra/sweeper=optuna", "optimizer.lrs=interval(1e-4,1e-1)"], "take optimizer.lr."),
        (["--cfg", "job", "+batch_size=16"], "take data.global_batch_size."),
    ],
)
def test_before_hydra_starts_anything(argv, said, capsys):
    assert run_script("train", argv, pytest.fail, "") == 2
    assert said in capsys.readouterr().err

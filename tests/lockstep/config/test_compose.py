"""What is composed from a command line, and the one sentence if it cannot be."""

import shutil
import subprocess
import sys

import pytest

from lockstep.commands.command_line import read_command
from lockstep.config import compose as module
from lockstep.config.compose import CONFIGS, compose, plain, typed_overrides
from lockstep.process.errors import UserError
from lockstep.process.script import exit_code_of
from lockstep.records.config import flatten

SRC = CONFIGS.parent / "src"


def composed(argv, configs=None, stored=None):
    """Return the exit code of a script that composes a config.

    With a list, the config is added to it.
    """

    def task():
        config = read_command("train", argv, "").compose(stored)
        (pytest.fail if configs is None else configs.append)(config)

    return exit_code_of(task)


WRONG = {
    "batch_size=16": "use data.global_batch_size.",
    "epochs=5": "use trainer.max_epochs.",
    "drop_out=0.1 model=small_cnn": "use model.dropout.",
    "optimizer.momentun=0.9": "use optimizer.momentum (optimizer=airbench or optimizer=muon).",
    "data.root=/images data=digits": "data=csv or data=image_folder or data=mnist has it.",
    "+data.rooot=photos": "There is no data.rooot: use data.root.",
    "optimizer.amsgrd=true": "'+optimizer.amsgrd=VALUE' adds one.",
    "trainer.fast_dev_run=true": "use debug=fast_dev_run.",
    "callbacks.checkpoints.moniter=x": "use callbacks.checkpoints.monitor.",
    "trainer.strategy.bucket_cap_mb=1": "There is no trainer.strategy.bucket_cap_mb: ",
    "trainer.strategy=ddp": "give a strategy as trainer=ddp",
    "model=a.Net": "a class of any package is model._target_=a.Net;",
    "data=/images": "a folder of images is data=image_folder data.root=/images;",
    "callbacks.mine=3": "'+callbacks.mine={_target_: …}' adds one.",
    "model=resnet50": "any model of timm is model=timm model.name=resnet50",
    "metrics=[f1,kapa]": "There is no metrics=kapa: did you mean metrics=kappa?",
    "~scheduler": "scheduler=VALUE or scheduler=none",
    "~model": "a run needs model. Give it another value, model=VALUE",
    "=3": "write KEY=VALUE",
    "seed=abc": "seed='abc': give a whole number",
    "fsdp": "write trainer=fsdp.",
    "trainer.max_epochs=2.5": "give a whole number",
    "data=csv data.test=/a=b": """quote the value, 'data.test="/a=b"'.""",
    "data=csv data.root=/a,b": """is several values: 'data.root="/a,b"' is one text""",
}
RIGHT = [
    "+trainer.strategy={_target_: lockstep.strategies.ddp.DDP, static_graph: true}",
    "trainer=ddp +trainer.strategy.find_unused_parameters=true",
    "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 3}",
    "+callbacks={early: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss}}",
    "metrics={auroc: {_target_: torchmetrics.AUROC, task: multiclass}}",
    "+optimizer.amsgrad=true",
    "trainer.detect_anomaly=true",
    "data.global_batch_size=max",
    "data=image_folder data.root=x data.page=all data.channels=2 data.range=[0,4095]",
    "data=csv data.root=x data.page=1 data.range=image data.bands=[3,2,1]",
]


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_refused_with_what_to_type(words):
    with pytest.raises(UserError) as refused:
        compose("train", words.split())
    assert WRONG[words] in str(refused.value) and "\n" not in str(refused.value)


def test_composing_imports_no_numpy_and_no_jinja2():
    code = (
        "import sys; from lockstep.config.compose import compose; compose('train', []); "
        "sys.exit(' '.join({'numpy', 'jinja2', 'torch'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("words", RIGHT)
def test_what_something_reads_passes(words):
    compose("train", [words] if "{" in words else words.split())


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("callbacks={x: {_target_: a.B}}", "++callbacks={x: {_target_: a.B}}"),
        ("+callbacks={x: {_target_: a.B}}", "++callbacks={x: {_target_: a.B}}"),
        ("+model=vit", "model=vit"),
        ("trainer.limit_val_batches=3", "++trainer.limit_val_batches=3"),
        ("~callbacks", "~callbacks"),
    ],
)
def test_a_sweep_takes_what_a_run_takes(typed, taken):
    assert module.adapt_to_multirun([typed]) == [taken]


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("run_id=2025_11_25", "run_id", "2025_11_25"),
        ("tags=[1,2.50,on]", "tags", ["1", "2.50", "on"]),
        ("data.name=7", "data.name", "7"),
        ("data.root=/tmp/größe (1)/a=b", "data.root", "/tmp/größe (1)/a=b"),
        ("data.root='/a,b'", "data.root", "/a,b"),
        ("data.root=~/x", "data.root", "/home/me/x"),
    ],
)
def test_a_name_stays_as_it_was_typed(word, key, value, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = plain(compose("train", [word]))
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("words", "group", "wanted"),
    [
        ([], "callbacks", ["checkpoints", "hardware", "progress"]),
        (
            ["callbacks=[default,spot]"],
            "callbacks",
            ["checkpoints", "hardware", "progress", "spot"],
        ),
        (["callbacks=none"], "callbacks", []),
        (
            ["~callbacks.checkpoints", "callbacks=spot"],
            "callbacks",
            ["hardware", "progress", "spot"],
        ),
        (["logger=wandb"], "logger", ["csv", "tensorboard", "wandb"]),
        (["~logger.tensorboard"], "logger", ["csv"]),
    ],
)
def test_callbacks_and_loggers_are_added_to_those_of_every_run(words, group, wanted):
    assert (
        sorted(name for name, node in plain(compose("train", words))[group].items() if node)
        == wanted
    )


def test_an_option_and_a_node_are_both_taken():
    callbacks = plain(compose("train", ["callbacks=spot", "callbacks={x: {_target_: a.B}}"]))[
        "callbacks"
    ]
    assert {"checkpoints", "spot", "x"} <= callbacks.keys()


@pytest.mark.parametrize("key", ["trainer.max_time", "model.freeze", "trainer.barebones"])
def test_a_null_may_be_removed(key):
    """Hydra 1.3 refuses it, and with 1.4 the key is gone."""
    removed, whole = (flatten(plain(compose("train", words))) for words in ([f"~{key}"], []))
    assert {**removed, key: None} == {**whole, key: None}


def test_data_of_another_class_get_no_recipe_of_the_default():
    cfg = compose("train", ["task._target_=a.Gan", "data._target_=a.Data"])
    assert (cfg.trainer.max_epochs, cfg.trainer.gradient_clip_val, list(cfg.data)) == (
        10,
        None,
        ["_target_"],
    )
    assert typed_overrides(cfg) == ["task._target_=a.Gan", "data._target_=a.Data"]


def test_another_model_class_gets_no_options_of_the_default():
    cfg = compose(
        "train", ["model._target_=a.Net", "+model.width=3", "scheduler._target_=a.Schedule"]
    )
    assert cfg.model == {"_target_": "a.Net", "width": 3} and cfg.scheduler == {
        "_target_": "a.Schedule",
        "_partial_": True,
        "monitor": None,
    }
    assert (cfg.data.image_size, cfg.optimizer.lr, cfg.trainer.max_epochs) == (32, 0.001, 10)


GLOBAL = "# @package _global_\n"
YAMLS = {
    f"{GLOBAL}defaults:\n  - override /model: birdnet\n": "Could not find 'model/birdnet'",
    f"{GLOBAL}defaults:\n  - override /modl: vit\n": "In 'experiment/mine': .*overr.* 'modl'.* by `- over",
    "defaults:\n  - override /model: vit\n": "begins with `# @package _global_`.",
    f"{GLOBAL}trainer:\n   max_epochs: 3\n  precision: 16\n": 'mine.yaml", line 4, column 3',
    f"{GLOBAL}model: small_cnn\n": "`- override /model: small_cnn`.",
    f"{GLOBAL}optimizer: {{lr: fast}}\n": "optimizer.lr='fast': give a number.*in a yaml",
    f"{GLOBAL}experiment_name: 2025\n": "experiment_name=2025: give it in quotes",
    f"{GLOBAL}trainer:\n  - max_epochs\n": "In 'experiment/mine': ConfigTypeError",
    f"{GLOBAL}trainer: {{max_epoch: 3}}\n": "use trainer.max_epochs. It is in a yaml",
}


@pytest.mark.parametrize(("text", "says"), YAMLS.items())
def test_a_wrong_experiment_yaml_is_refused_in_one_sentence(text, says, tmp_path, monkeypatch):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=says) as raised:
        compose("train", ["experiment=mine"])
    assert "\n" not in str(raised.value) and "pkg://" not in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--epochs", "5"], "written without dashes: trainer.max_epochs=VALUE."),
        (["--lr=0.1"], "written without dashes: optimizer.lr=0.1."),
        (["--config-name", "mine"], "choose a recipe as experiment=NAME"),
        (["-cn", "mine"], "choose a recipe as experiment=NAME"),
        (["-m", "--cfg", "job", "seed=1,2"], "-m runs the jobs of a sweep"),
        (["seed.foo=1"], "There is no seed.foo"),
        (["loss.weights=1"], "use loss.class_weights."),
        (["--config-dir", "/nowhere"], "--config-dir /nowhere is not a folder."),
        (["batch_size=16,32", "-m"], "use data.global_batch_size."),
        (["-m", "model=glob(alex*)", "model.dropuot=0.1"], "use model.dropout."),
        (["-m", "model=glob(nosuch*)"], "model=glob(nosuch*) matches no option"),
        (["-m", "hydra/sweeper=optuna", "optimizer.lrs=interval(1e-4,1e-1)"], "use optimizer.lr."),
        (["--cfg", "job", "+batch_size=16"], "use data.global_batch_size."),
    ],
)
def test_before_anything_starts(argv, said, capsys):
    assert composed(argv) == 2
    assert said in capsys.readouterr().err


def test_a_group_outside_the_defaults_is_added(tmp_path):
    (tmp_path / "regulariser").mkdir()
    (tmp_path / "regulariser" / "l1.yaml").write_text("weight: 0.1\n")
    configs = []
    assert composed(["--config-dir", str(tmp_path), "+regulariser=l1"], configs) == 0
    assert configs[0]["regulariser"] == {"weight": 0.1}
    words = [f"hydra.searchpath=[file://{tmp_path}]", "+regulariser=l1", "+model=alexnet"]
    assert module.adapt_to_multirun(words)[1:] == ["+regulariser=l1", "model=alexnet"]


def test_cfg_prints_the_config_or_a_part_of_it(capsys):
    assert composed(["optimizer.lr=0.5", "--cfg", "job", "--package", "optimizer"]) == 0
    assert "\nlr: 0.5\n" in capsys.readouterr().out


def test_an_interpolation_is_read_where_its_key_stands(capsys):
    words = [
        "data=digits",
        "data.eval_batch_size=${.global_batch_size}",
        "data.root=${oc.env:NO_SUCH_ONE}/x",
    ]
    assert composed([*words[:2], "--cfg", "job", "--resolve"]) == 0
    assert "eval_batch_size: 64\n" in capsys.readouterr().out
    cfg = compose("train", ["data=image_folder", *words[1:]])
    assert typed_overrides(cfg)[1:] == words[1:]
    with pytest.raises(UserError, match="Environment variable 'NO_SUCH_ONE' not found"):
        plain(cfg)


def test_a_folder_of_more_yamls_counts_in_every_mode(tmp_path, capsys):
    folder = tmp_path / "größe (1)"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text(
        "_target_: models.small_cnn.SmallCNN\ndropout: 0.125\n"
    )
    argv = ["--config-dir", str(folder), "model=mine"]
    seen = []
    assert composed(argv, seen) == 0
    assert seen[0]["model"]["dropout"] == 0.125
    assert plain(compose("train", seen[0]["overrides"]))["model"] == seen[0]["model"], (
        "for a search of the batch"
    )
    assert composed([*argv, "--cfg", "job"]) == 0
    assert "dropout: 0.125" in capsys.readouterr().out
    assert composed([*argv, "model.dropuot=1"]) == 2
    assert "use model.dropout" in capsys.readouterr().err
    config = {
        **plain(compose("train", ["model=small_cnn"])),
        "choices": {"model": "mine"},
        "overrides": [],
    }
    config["model"]["dropout"] = 0.25
    for options in (argv[:2], []):  # a run goes on with the folder and without it
        assert composed(options, seen, config) == 0 and seen.pop()["model"]["dropout"] == 0.25

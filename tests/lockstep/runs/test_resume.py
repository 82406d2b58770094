"""The config of a run that goes on: what ran, then the new overrides."""

import shutil

import pytest
import yaml

from lockstep.config import compose as module
from lockstep.config.compose import CONFIGS, chosen_options, compose, plain, whole_config
from lockstep.process.errors import UserError
from lockstep.runs.resume import find_stored_config


def leave_run(logs, run_id, *words):
    """Leave the folder of a run that was started with these words, and return its config."""
    cfg = compose("train", list(words))
    folder = logs / "train" / "runs" / run_id
    folder.mkdir(parents=True)
    config = {**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": list(words)}
    config["trainer"].update(devices=3, num_nodes=5)  # what `auto` came to
    (folder / "run.json").write_text('{"steps": 1}')
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return config


def resumed(logs, *words):
    words = [f"paths.log_dir={logs}", *words]
    return compose("train", words, find_stored_config(words))


BEFORE = [
    "experiment=quickstart",
    "trainer=fsdp_sim",
    "trainer.reshard_after_forward=false",
    "trainer.max_epochs=7",
]


SAME = (
    "data",
    "model",
    "optimizer",
    "scheduler",
    "task",
    "augmentation",
    "callbacks",
    "experiment_name",
)


@pytest.fixture(scope="module")
def renamed_run(tmp_path_factory):
    """Return the logs and the config of a run whose folder has another name now."""
    logs = tmp_path_factory.mktemp("renamed")
    config = leave_run(logs, "r", *BEFORE, "run_id=r", "resume=auto", "tags=[a]")
    (logs / "train" / "runs" / "r").rename(logs / "train" / "runs" / "renamed")
    return logs, config


@pytest.mark.parametrize(
    "words",
    [
        ["resume=renamed"],
        ["resume=auto", "run_id=renamed"],
        pytest.param([*BEFORE, "resume=auto", "run_id=renamed"], marks=pytest.mark.slow),
    ],
)
def test_a_renamed_run_goes_on_with_what_ran(words, renamed_run):
    logs, before = renamed_run
    cfg = resumed(logs, *words, "trainer.max_epochs=9")
    now = plain(cfg)
    assert now["trainer"]["max_epochs"] == 9
    assert now["trainer"]["devices"] == "auto"
    assert now["tags"] == ["a"]
    assert now["trainer"]["strategy"]["reshard_after_forward"] is False
    assert {key: now[key] for key in SAME} == {key: before[key] for key in SAME}
    assert chosen_options(cfg)["experiment"] == "quickstart"
    assert now["paths"]["log_dir"] == str(logs)


def test_an_id_alone_resumes_nothing(renamed_run):
    logs, _ = renamed_run
    assert plain(resumed(logs, "run_id=r"))["trainer"]["max_epochs"] == 26


def test_a_group_that_is_chosen_anew_is_composed_anew(tmp_path):
    leave_run(tmp_path, "r", "model=small_cnn", "data=digits", "optimizer=adamw", "optimizer.lr=0.5",
              "trainer.max_epochs=7", "trainer=ddp_sim", "trainer.devices=4", "metrics=f1")  # fmt: skip
    now = plain(resumed(tmp_path, "resume=r", "optimizer=sgd", "trainer=gpu", "metrics=kappa"))
    fresh = plain(compose("train", ["optimizer=sgd", "trainer=gpu", "metrics=kappa"]))
    assert now["optimizer"] == fresh["optimizer"] and now["metrics"] == fresh["metrics"]
    trainer = now["trainer"]  # what is trained does not change with where it is
    assert (trainer["devices"], trainer["accelerator"], trainer["max_epochs"]) == (1, "gpu", 7)
    assert plain(resumed(tmp_path, "resume=r", "optimizer=adamw"))["optimizer"]["lr"] == 0.5, (
        "the same is not anew"
    )


def test_an_edited_recipe_does_not_change_a_run_that_ran(tmp_path, monkeypatch):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    recipe = tmp_path / "configs" / "experiment" / "mine.yaml"
    text = "# @package _global_\ndefaults:\n  - override /model: own\n  - override /data: digits\noptimizer: {lr: 0.25}\n"
    recipe.write_text(text)
    model = tmp_path / "configs" / "model" / "own.yaml"
    model.write_text("_target_: models.small_cnn.SmallCNN\ndropout: 0.125\n")
    before = leave_run(tmp_path, "r", "experiment=mine")
    recipe.write_text(text.replace("0.25", "0.75").replace("own", "alexnet"))
    repeated = plain(resumed(tmp_path, "resume=auto", "run_id=r", "experiment=mine"))
    recipe.unlink(), model.unlink()
    for now in (repeated, plain(resumed(tmp_path, "resume=r"))):
        assert (
            now["optimizer"]["lr"] == 0.25
            and now["model"] == before["model"]
            and now["data"] == before["data"]
        )


EARLY = "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 3}"


@pytest.fixture(scope="module")
def changed_run(tmp_path_factory):
    """Return the logs of a run that has more and fewer keys than its options."""
    logs = tmp_path_factory.mktemp("changed")
    words = [EARLY, "~callbacks.progress", "data=cifar10", "data.root=/old"]
    leave_run(logs, "r", *words, "+optimizer.amsgrad=true")
    return logs


def test_what_was_added_or_removed_stays_so(changed_run):
    cfg = resumed(changed_run, "resume=r", "data.root=/new", "callbacks.early.patience=9")
    now = plain(cfg)
    assert now["data"]["root"] == "/new"
    assert now["callbacks"]["early"]["patience"] == 9
    assert not now["callbacks"]["progress"]
    assert now["callbacks"]["checkpoints"]
    assert now["optimizer"]["amsgrad"]
    overrides = cfg.hydra.overrides.task
    assert EARLY in overrides
    assert "data.root=/new" in overrides
    assert "data.root=/old" not in overrides


def test_what_was_added_can_be_removed(changed_run):
    """A job script types the other removal at each start."""
    cfg = resumed(changed_run, "resume=r", "~callbacks.early", "~callbacks.progress")
    callbacks = plain(cfg)["callbacks"]
    assert "early" not in callbacks
    assert not callbacks["progress"]
    assert "~callbacks.progress" in cfg.hydra.overrides.task


def test_a_resume_drops_old_keys_and_adds_new_defaults(tmp_path):
    before = leave_run(tmp_path, "r", "model=small_cnn", "data=digits")
    before["trainer"].update(record_hashes=True), before["callbacks"]["checkpoints"].update(gone=1)
    before["data"].update(gone=2), before.update(gone=3), before["trainer"].pop("num_threads")
    (tmp_path / "train" / "runs" / "r" / "config.yaml").write_text(yaml.safe_dump(before))
    now = plain(resumed(tmp_path, "resume=r"))
    assert "record_hashes" not in now["trainer"] and now["trainer"]["num_threads"] == "auto"
    assert not {"gone"} & {*now, *now["data"], *now["callbacks"]["checkpoints"]}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("lockstep.strategies.allreduce.AllReduce", "strategies.allreduce.AllReduce"),
        ("lockstep.strategies.ddp.DDP", "lockstep.strategies.ddp.DDP"),
    ],
)
def test_a_stored_class_is_kept_unless_its_module_has_moved(stored, expected, tmp_path):
    before = leave_run(tmp_path, "r", "trainer=allreduce_sim")
    before["trainer"]["strategy"]["_target_"] = stored
    (tmp_path / "train/runs/r/config.yaml").write_text(yaml.safe_dump(before))
    now = plain(resumed(tmp_path, "resume=r"))
    assert now["trainer"]["strategy"]["_target_"] == expected


def test_a_resume_does_not_scale_learning_rates_twice(tmp_path):
    leave_run(
        tmp_path,
        "r",
        "optimizer.scale_lr_with_batch=true",
        "optimizer.lr=0.5",
        "trainer.accumulate_grad_batches=4",
    )
    now = plain(resumed(tmp_path, "resume=r"))
    assert (now["optimizer"]["scale_lr_with_batch"], now["optimizer"]["lr"]) == (False, 0.5)
    assert now["trainer"]["accumulate_grad_batches"] == 1


def test_a_launcher_decides_how_many_ranks_there_are(tmp_path, monkeypatch):
    leave_run(tmp_path, "r", "trainer=ddp_sim", "trainer.devices=4", "trainer.num_nodes=2")
    assert resumed(tmp_path, "resume=r").trainer.devices == 3, "as it ran"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert resumed(tmp_path, "resume=r").trainer.devices == "auto"


def test_a_buckets_config_gives_nothing_of_this_machine(tmp_path, monkeypatch, capsys):
    stated = ["data=cifar10", "data.root=/theirs", "trainer.max_epochs=5", "paths.logbook_dir=/etc", "optimizer.lr=0.5",
              "+callbacks.x={_target_: os.system}"]  # fmt: skip
    theirs, fetched = leave_run(tmp_path / "theirs", "r", *stated), []

    def fetch_record(bucket, folder):
        fetched.append(bucket.uri)
        folder.bucket_config_path.parent.mkdir(parents=True, exist_ok=True)
        folder.bucket_config_path.write_text(yaml.safe_dump({**theirs, "task_name": "../../.."}))

    monkeypatch.setattr("lockstep.storage.fetch.fetch_record", fetch_record)
    words = ["resume=auto", "run_id=r", "s3.uri=s3://bucket/runs"]
    config = plain(resumed(tmp_path, *words))
    assert (
        config["trainer"]["max_epochs"] == 5
        and config["optimizer"]["lr"] == 0.5
        and config["task_name"] == "train"
    )
    assert fetched == ["s3://bucket/runs/r"]
    fresh = plain(
        compose("train", [f"paths.log_dir={tmp_path}", "s3.uri=s3://bucket/runs", "data=cifar10"])
    )
    assert all(
        config[part] == fresh[part]
        for part in ("paths", "data", "s3", "logger", "callbacks", "ckpt_path")
    )
    left = "the bucket's config; give them again to have them: data.root, callbacks.x"
    assert capsys.readouterr().out.rstrip().endswith(left)
    assert plain(resumed(tmp_path, *words, "data.root=/mine"))["data"]["root"] == "/mine"


def test_a_rejected_trainer_that_is_typed_is_not_listed(tmp_path, capsys):
    theirs = leave_run(
        tmp_path / "theirs", "r", "trainer=hivemind", "trainer.initial_peers=[/ip4/1]"
    )
    bucket = tmp_path / "train/runs/r/from-bucket"
    bucket.mkdir(parents=True)
    (bucket / "config.yaml").write_text(yaml.safe_dump(theirs))
    resumed(tmp_path, "resume=auto", "run_id=r")
    assert "give them again to have them: trainer" in capsys.readouterr().out
    resumed(tmp_path, "resume=auto", "run_id=r", "trainer=cpu")
    assert "give them again" not in capsys.readouterr().out


def test_nonsense_in_the_bucket_is_refused_in_a_sentence(tmp_path):
    config = tmp_path / "train" / "runs" / "r" / "from-bucket" / "config.yaml"
    config.parent.mkdir(parents=True)
    for nonsense in ("[]", "data: 3", "!!python/object/apply:os.system [true]"):
        config.write_text(nonsense)
        with pytest.raises(UserError, match="from-bucket/config.yaml"):
            resumed(tmp_path, "resume=auto", "run_id=r")


# What a job script may have with a plus or a tilde.
SCRIPTS = [
    [
        "+optimizer.amsgrad=true",
        "~callbacks.progress",
        "+metrics.auroc={_target_: torchmetrics.AUROC, task: multiclass}",
    ],
    [
        "task._target_=a.Lit",
        "+task.lr=0.1",
        "model._target_=a.Net",
        "+model.width=3",
        "~logger.tensorboard",
    ],
    ["++optimizer.eps=1e-4", "~optimizer.weight_decay", "optimizer.scale_lr_with_batch=true"],
    [
        "+experiment=quickstart",
        "+callbacks.x._target_=a.B",
        "+callbacks.x.n=3",
        "~data.crop_padding",
    ],
    [
        "trainer=ddp",
        "+trainer.strategy.static_graph=true",
        "+trainer.benchmark=true",
        "optimizer.scale_lr_with_batch=true",
        "optimizer.lr=0.5",
    ],
    ["data._target_=a.Data", "+data.size=3", "loss._target_=a.Loss", "+loss.k=2", "~callbacks"],
    ["+callbacks={x: {_target_: a.B, n: 3}}", "metrics={f: {_target_: a.F}}", "+callbacks.x.m=4"],
]


def without_nulls(node):
    """Return a config without its null values, which mean the same as missing ones."""
    return (
        {k: without_nulls(v) for k, v in node.items() if v is not None}
        if isinstance(node, dict)
        else node
    )


def start_once(folder, words):
    """Start a job script's command line for a moment; return the config that the run writes."""
    config = whole_config(compose("train", words, find_stored_config(words)))
    if config["optimizer"].pop("scale_lr_with_batch"):
        config["optimizer"]["lr"] *= 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text('{"steps": 1}')
    return config


def starts(logs, script, came_from="disk", further=4):
    """Start a job script again and again; yield the first config and each further one."""
    folder = logs / "train" / "runs" / "r"
    words = [f"paths.log_dir={logs}", "run_id=r", "resume=auto", "s3.uri=s3://bucket/runs", *script]
    first = start_once(folder, words)
    place = folder / "config.yaml"
    if came_from == "bucket":
        place = folder / "from-bucket" / "config.yaml"
        place.parent.mkdir()
    place.write_text(yaml.safe_dump(first))
    for _ in range(further):
        config = start_once(folder, words)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        yield first, config


@pytest.mark.slow
@pytest.mark.parametrize("came_from", ["disk", "bucket"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_command_line_works_at_every_start(script, came_from, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.storage.fetch.fetch_record", lambda bucket, folder: None)
    for first, config in starts(tmp_path, script, came_from):
        assert sorted(config["overrides"]) == sorted(first["overrides"])
        values = [
            {k: v for k, v in c.items() if k not in ("choices", "overrides")}
            for c in (first, config)
        ]
        assert without_nulls(values[1]) == without_nulls(values[0])


def test_a_plus_and_a_tilde_work_at_the_third_start(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.storage.fetch.fetch_record", lambda bucket, folder: None)
    script = [
        "+optimizer.amsgrad=true",
        "~callbacks.progress",
        "task._target_=a.Lit",
        "+task.lr=0.1",
    ]
    for first, config in starts(tmp_path, script, further=2):
        assert config["optimizer"] == first["optimizer"]
        assert config["task"] == first["task"]
        assert not config["callbacks"].get("progress")


def test_a_resume_by_id_adds_what_the_run_has_already(tmp_path):
    leave_run(
        tmp_path,
        "r",
        "+optimizer.amsgrad=true",
        "optimizer.scale_lr_with_batch=true",
        "optimizer.lr=0.25",
    )
    cfg = resumed(tmp_path, "resume=r", "+optimizer.amsgrad=true")
    assert cfg.optimizer.amsgrad is True
    assert list(cfg.hydra.overrides.task).count("+optimizer.amsgrad=true") == 1


def test_what_was_removed_from_a_part_stays_removed(tmp_path):
    leave_run(tmp_path, "r", "~optimizer.weight_decay", "optimizer=sgd")
    assert "weight_decay" not in plain(resumed(tmp_path, "resume=r"))["optimizer"]

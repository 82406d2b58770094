"""What a run that goes on keeps of its options."""

import shutil

import pytest
import yaml

from lockstep.config.compose import chosen_options, compose, plain
from lockstep.launch.resume import kept_words, with_options_of_run
from lockstep.runs.errors import UserError
from lockstep.runs.own_config import signed

BEFORE = ["experiment=quickstart", "trainer=fsdp_sim", "trainer.cpu_offload=true", "trainer.max_epochs=7"]


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ([], BEFORE),
        (["optimizer.lr=1"], BEFORE),
        (["trainer.max_epochs=9"], BEFORE[:3]),
        (["++trainer.max_epochs=9"], BEFORE[:3]),
        # ddp_sim has no offload; how many epochs there are it knows too.
        (["trainer=ddp_sim"], ["experiment=quickstart", "trainer.max_epochs=7"]),
        (["trainer=ddp_sim", "trainer.max_epochs=8"], ["experiment=quickstart"]),
        (["~trainer.max_epochs"], BEFORE),
    ],
)
def test_what_is_named_now_wins_and_a_group_named_anew_forgets_what_it_lacks(now, kept):
    assert kept_words(BEFORE, now) == kept


def leave_run(logs, run_id, words, record=True, name="config.yaml"):
    folder = logs / "train" / "runs" / run_id
    folder.mkdir(parents=True)
    if record:
        (folder / "run.json").write_text("{}")
    (folder / name).write_text(signed(yaml.safe_dump({"overrides": words}), folder / name, logs))


def resumed(logs, *words):
    return plain(compose("train", with_options_of_run([f"paths.log_dir={logs}", *words])))


def test_resume_composes_from_the_runs_own_words(tmp_path, capsys):
    leave_run(tmp_path, "r", [*BEFORE, "run_id=r", "resume=auto", "paths.log_dir=/nowhere", "hydra.run.dir=/x", 3])
    config = resumed(tmp_path, "resume=r", "trainer.max_epochs=9")
    assert config["experiment_name"] == "quickstart" and config["trainer"]["strategy"]["cpu_offload"]
    assert config["trainer"]["max_epochs"] == 9 and config["resume"] == "r" and config["run_id"] is None
    assert config["paths"]["log_dir"] == str(tmp_path)
    assert capsys.readouterr().out == (
        "The run's own options: experiment=quickstart trainer=fsdp_sim trainer.cpu_offload=true\n"
    )
    assert resumed(tmp_path, "resume=auto", "run_id=r")["trainer"]["max_epochs"] == 7
    assert resumed(tmp_path, "run_id=r")["trainer"]["max_epochs"] == 26


def test_a_node_without_the_record_goes_by_its_own_config_and_one_without_that_by_the_command_line(tmp_path):
    leave_run(tmp_path, "r", ["trainer.max_epochs=7"], record=False, name="config-node1.yaml")
    assert resumed(tmp_path, "resume=r")["trainer"]["max_epochs"] == 7
    assert resumed(tmp_path, "resume=other")["trainer"]["max_epochs"] == 26


def test_a_launcher_that_says_how_many_ranks_there_are_is_believed(tmp_path, monkeypatch):
    leave_run(tmp_path, "r", ["trainer=ddp_sim", "trainer.devices=4", "trainer.num_nodes=2"])
    assert resumed(tmp_path, "resume=r")["trainer"]["devices"] == 4
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = resumed(tmp_path, "resume=r")["trainer"]
    assert trainer["devices"] != 4 and trainer["num_nodes"] != 2


def test_accumulation_is_not_kept_it_follows_the_ranks(tmp_path):
    leave_run(tmp_path, "r", ["trainer=ddp_sim", "trainer.accumulate_grad_batches=4", "trainer.max_epochs=7"])
    trainer = resumed(tmp_path, "resume=r")["trainer"]
    assert (trainer["accumulate_grad_batches"], trainer["max_epochs"]) == (1, 7)


def test_another_trainer_has_devices_of_its_own(tmp_path):
    leave_run(
        tmp_path, "r", ["trainer=ddp_sim", "trainer.devices=4", "trainer.accelerator=cpu", "trainer.max_epochs=7"]
    )
    trainer = resumed(tmp_path, "resume=r", "trainer=gpu")["trainer"]
    assert (trainer["devices"], trainer["accelerator"], trainer["max_epochs"]) == (1, "gpu", 7)


def test_a_key_that_only_the_runs_own_options_bring_can_be_given_anew(tmp_path):
    early = "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 3}"
    leave_run(tmp_path, "r", ["data=cifar10", "data.root=/old", early])
    config = resumed(tmp_path, "resume=r", "data.root=/new", "callbacks.early.patience=9")
    assert config["data"]["root"] == "/new" and config["callbacks"]["early"]["patience"] == 9
    assert "early" not in resumed(tmp_path, "resume=r", "~callbacks.early")["callbacks"]


HOSTILE = [
    "paths.logbook_dir=/etc", "data.root=/etc", "s3.last_interval_s=9.0", "optimizer.lr=${oc.env:HOME}",
    "+logger.csv.path=/home/me/.bashrc", "~callbacks.checkpoints", "experiment=../../logs/train/runs/r/evil",
    "callbacks.checkpoints={_target_: lockstep.callbacks.checkpoints.Checkpoints, folder: /x}",
    "++callbacks.checkpoints.folder=/x", "ckpt_path=/etc/passwd", "logger.csv.path=/x", "task_name=../../..",
]  # fmt: skip


def bucket_with(tmp_path, monkeypatch, *words, **other):
    """A bucket whose config.yaml was composed from these words; returns the addresses that were asked."""
    from lockstep.storage import fetch as storage

    cfg = compose("train", list(words))
    config = {**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": [*words, *HOSTILE], **other}
    fetched = []

    def fetch_run(store, folder):
        fetched.append((store.options.uri, folder.run_id))
        folder.bucket_config.parent.mkdir(parents=True, exist_ok=True)
        folder.bucket_config.write_text(yaml.safe_dump(config))

    monkeypatch.setattr(storage, "fetch_run", fetch_run)
    return fetched


def test_what_came_from_a_bucket_says_names_and_values_and_nothing_of_this_machine(tmp_path, monkeypatch, capsys):
    stated = ["data=cifar10", "data.root=/theirs", "trainer.max_epochs=5", "paths.logbook_dir=/etc", "optimizer.lr=0.5"]
    fetched = bucket_with(tmp_path, monkeypatch, *stated, task_name="../../..")
    words = ["resume=auto", "run_id=r", "s3.uri=s3://bucket/runs"]
    config = resumed(tmp_path, *words)
    assert config["trainer"]["max_epochs"] == 5 and config["optimizer"]["lr"] == 0.5 and config["task_name"] == "train"
    assert fetched == [("s3://bucket/runs", "r")]
    fresh = plain(compose("train", [f"paths.log_dir={tmp_path}", "s3.uri=s3://bucket/runs", "data=cifar10"]))
    assert all(config[part] == fresh[part] for part in ("paths", "data", "s3", "logger", "callbacks", "ckpt_path"))
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "Not taken from a config that is not from here, give them again to have them: data.root"
    assert resumed(tmp_path, *words, "data.root=/mine")["data"]["root"] == "/mine"
    assert "Not taken" not in capsys.readouterr().out


def test_what_was_fetched_is_never_taken_for_this_machines_own(tmp_path, monkeypatch):
    """Not by the next start either, whatever became of this one."""
    bucket_with(tmp_path, monkeypatch, "data=cifar10", "data.root=/theirs", "+callbacks.x={_target_: os.system}")
    for words in (["resume=auto", "run_id=r", "s3.uri=s3://bucket/runs"], ["resume=auto", "run_id=r"], ["resume=r"]):
        config = resumed(tmp_path, *words)
        assert config["data"]["name"] == "cifar10" and config["data"]["root"] is None
        assert "x" not in config["callbacks"]


def test_a_run_folder_that_was_copied_here_is_data_too(tmp_path):
    words = ["data=cifar10", "data.root=/mine", "trainer.max_epochs=7", "+callbacks.x={_target_: os.system}"]
    leave_run(tmp_path / "there", "r", words)
    cfg, path = compose("train", words), tmp_path / "there" / "train" / "runs" / "r" / "config.yaml"
    whole = yaml.safe_dump({**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": words})
    path.write_text(signed(whole, path, tmp_path / "there"))
    assert resumed(tmp_path / "there", "resume=r")["data"]["root"] == "/mine"
    shutil.copytree(tmp_path / "there" / "train", tmp_path / "here" / "train")
    config = resumed(tmp_path / "here", "resume=r")
    assert config["data"]["name"] == "cifar10" and config["trainer"]["max_epochs"] == 7
    assert config["data"]["root"] is None and "x" not in config["callbacks"]


def test_a_group_that_is_named_now_is_not_asked_of_the_bucket(tmp_path, monkeypatch):
    bucket_with(tmp_path, monkeypatch, "model=alexnet", choices={"data": "digits", "model": "mine"})
    words = ["resume=auto", "run_id=r", "s3.uri=s3://bucket/runs"]
    with pytest.raises(UserError, match="names model='mine', which this clone does not have"):
        resumed(tmp_path, *words)
    assert "AlexNet" not in str(resumed(tmp_path, *words, "model=small_cnn")["model"])


@pytest.mark.parametrize("nonsense", ["[]", "data: 3", "a: &x [1]\nb: *x", "!!python/object/apply:os.system [true]"])
def test_nonsense_in_the_bucket_is_refused_in_a_sentence(nonsense, tmp_path):
    config = tmp_path / "train" / "runs" / "r" / "from-bucket" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(nonsense)
    with pytest.raises(UserError, match="from-bucket/config.yaml"):
        resumed(tmp_path, "resume=r")


OF_DIGITS = {"data": "digits", "model": "small_cnn"}


def leave_old_run(logs, run_id, typed, at_start=(), choices=OF_DIGITS):
    """As a version left it whose defaults were digits and a small CNN."""
    cfg = compose("train", [*(f"{group}={name}" for group, name in choices.items()), *typed, *at_start])
    folder = logs / "train" / "runs" / run_id
    folder.mkdir(parents=True)
    own = {**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": typed}
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(signed(yaml.safe_dump(own), folder / "config.yaml", logs))
    (folder / "defaults.yaml").write_text(yaml.safe_dump({"choices": OF_DIGITS}))
    return own


def test_a_run_of_other_defaults_goes_on_with_its_own(tmp_path):
    old = leave_old_run(tmp_path, "r", ["trainer=ddp_sim", "optimizer.lr=0.5"])
    now = resumed(tmp_path, "resume=r", "trainer.max_epochs=20")
    assert now["trainer"].pop("max_epochs") == 20 and old["trainer"].pop("max_epochs") == 10
    same = ("data", "model", "optimizer", "scheduler", "trainer", "classifier", "augmentation")
    assert {key: now[key] for key in same} == {key: old[key] for key in same}
    assert resumed(tmp_path, "resume=r", "data=synthetic")["data"]["name"] == "synthetic", "what is said now wins"


def test_a_vit_of_before_keeps_its_image_size_epochs_and_rate(tmp_path):
    before = ["data.image_size=32", "data.resize=null", "trainer.max_epochs=10", "optimizer.lr=0.001",
              "scheduler.warmup_epochs=0.0"]  # fmt: skip
    typed = ["model=vit", "data=cifar10", "trainer=ddp_sim"]
    old = leave_old_run(tmp_path, "r", typed, before, {})
    now = resumed(tmp_path, "resume=r")
    for key in ("data", "model", "optimizer", "scheduler", "trainer", "classifier"):
        assert now[key] == old[key], key


def test_a_run_of_todays_defaults_is_told_nothing_more(tmp_path, capsys):
    leave_old_run(tmp_path, "r", ["trainer=ddp_sim"], choices={})
    defaults = dict(chosen_options(compose("train", [])))
    (tmp_path / "train/runs/r/defaults.yaml").write_text(yaml.safe_dump({"choices": defaults}))
    resumed(tmp_path, "resume=r")
    assert capsys.readouterr().out == "The run's own options: trainer=ddp_sim\n"

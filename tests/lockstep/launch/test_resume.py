"""What a run that goes on keeps of its options."""

import pytest
import yaml

from lockstep.config.compose import compose, plain
from lockstep.launch.resume import kept_words, with_options_of_run

BEFORE = ["experiment=quickstart", "trainer=fsdp_sim", "trainer.sharded_checkpoint=true", "trainer.max_epochs=7"]


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ([], BEFORE),
        (["optimizer.lr=1"], BEFORE),
        (["trainer.max_epochs=9"], BEFORE[:3]),
        (["++trainer.max_epochs=9"], BEFORE[:3]),
        # ddp_sim writes no shards; how many epochs there are it knows too.
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
    (folder / name).write_text(yaml.safe_dump({"overrides": words}))


def resumed(logs, *words):
    return plain(compose("train", with_options_of_run([f"paths.log_dir={logs}", *words])))


def test_resume_composes_from_the_runs_own_words(tmp_path, capsys):
    leave_run(tmp_path, "r", [*BEFORE, "run_id=r", "resume=auto", "paths.log_dir=/nowhere", "hydra.run.dir=/x", 3])
    config = resumed(tmp_path, "resume=r", "trainer.max_epochs=9")
    assert config["experiment_name"] == "quickstart" and config["trainer"]["strategy"]["sharded_checkpoint"]
    assert config["trainer"]["max_epochs"] == 9 and config["resume"] == "r" and config["run_id"] is None
    assert config["paths"]["log_dir"] == str(tmp_path)
    assert capsys.readouterr().out == (
        "The run's own options: experiment=quickstart trainer=fsdp_sim trainer.sharded_checkpoint=true\n"
    )
    assert resumed(tmp_path, "resume=auto", "run_id=r")["trainer"]["max_epochs"] == 7
    assert resumed(tmp_path, "run_id=r")["trainer"]["max_epochs"] == 10


def test_a_node_without_the_record_goes_by_its_own_config_and_one_without_that_by_the_command_line(tmp_path):
    leave_run(tmp_path, "r", ["trainer.max_epochs=7"], record=False, name="config-node1.yaml")
    assert resumed(tmp_path, "resume=r")["trainer"]["max_epochs"] == 7
    assert resumed(tmp_path, "resume=other")["trainer"]["max_epochs"] == 10


def test_a_launcher_that_says_how_many_ranks_there_are_is_believed(tmp_path, monkeypatch):
    leave_run(tmp_path, "r", ["trainer=ddp_sim", "trainer.devices=4", "trainer.num_nodes=2"])
    assert resumed(tmp_path, "resume=r")["trainer"]["devices"] == 4
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = resumed(tmp_path, "resume=r")["trainer"]
    assert trainer["devices"] != 4 and trainer["num_nodes"] != 2


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
    "+logger.csv.path=/home/me/.bashrc", "~callbacks.checkpoints",
    "callbacks.checkpoints={_target_: lockstep.callbacks.checkpoints.Checkpoints, folder: /x}",
    "++callbacks.checkpoints.folder=/x", "ckpt_path=/etc/passwd", "logger.csv.path=/x",
]  # fmt: skip


def test_what_came_from_a_bucket_says_nothing_of_this_machines_places(tmp_path, monkeypatch, capsys):
    from lockstep.storage import fetch as storage

    fetched = []
    monkeypatch.setattr(storage, "fetch_run", lambda store, folder: fetched.append((store.options.uri, folder.run_id)))
    leave_run(tmp_path, "r", ["data=cifar10", *HOSTILE, "trainer.max_epochs=5"])
    config = resumed(tmp_path, "resume=auto", "run_id=r", "s3.uri=s3://bucket/runs", "data.root=/mine")
    assert config["trainer"]["max_epochs"] == 5 and fetched == [("s3://bucket/runs", "r")]
    own = [f"paths.log_dir={tmp_path}", "s3.uri=s3://bucket/runs", "data=cifar10", "data.root=/mine"]
    fresh = plain(compose("train", own))
    same = ("paths", "data", "s3", "optimizer", "logger", "callbacks", "ckpt_path")
    assert all(config[part] == fresh[part] for part in same)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Not taken from the bucket") and "+logger.csv.path" in said and "data.root" not in said
    words = [HOSTILE[0], "experiment=quickstart"]
    (tmp_path / "train" / "runs" / "r" / "config.yaml").write_text(yaml.safe_dump({"overrides": words}))
    assert resumed(tmp_path, "resume=r")["paths"]["logbook_dir"] == "/etc", "this machine's own run says it"

"""The plan of a run, what is refused before torch is imported, and the run's lock."""

import contextlib
import copy
import functools
import subprocess
import sys
from dataclasses import replace

import pytest

from lockstep.config import class_source
from lockstep.config.compose import compose, whole_config
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.ranks.find import Cluster, find_ranks
from lockstep.records.batch import ACCUMULATION, Batch
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord, read_record, write_record
from lockstep.runs.batch_size import decide_batch, refuse_other_epoch, resolve_batch
from lockstep.runs.checks import check_before_start
from lockstep.runs.first_record import find_recipe_changes, format_headlines
from lockstep.runs.opening import CommandEnded, open_run
from lockstep.runs.resume import find_reached_limit, read_earlier_config
from lockstep.runs.run import Run
from lockstep.runs.run_lock import hold_run_lock

WORDS = ["experiment=quickstart", "trainer=ddp_sim"]
SCALED = ["optimizer.lr=0.1", "optimizer.scale_lr_with_batch=true", "optimizer.base_batch_size=16"]
ALONE = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)


@functools.cache
def composed(*words):
    return whole_config(compose("train", list(words)))


def config_of(*words):
    return copy.deepcopy(composed(*words))


def run_of(path, *words) -> Run:
    """Return a run whose folder may hold what an earlier start has left."""
    config = config_of(*WORDS, *words)
    cluster = find_ranks(config, {})
    folder = RunFolder(path)
    is_new = not folder.record_path.exists()
    record = RunRecord() if is_new else read_record(folder.record_path)
    before = {} if is_new else read_earlier_config(folder) or {}
    batch, _ = decide_batch(config, cluster, record, before, pytest.fail)
    return Run(config, cluster, folder, batch)


@pytest.mark.parametrize("data", ["data=digits", "data._target_=plain_task.Numbers"])
def test_a_change_is_told_against_the_chosen_datas_default(tmp_path, data):
    """The default data and model have another number of epochs, which configs/fits says."""
    config = config_of(data, "trainer.max_epochs=3")
    run = run_of(tmp_path / "r")
    run = replace(run, config=config)
    assert ["trainer.max_epochs", 10, 3] in find_recipe_changes(run)
    assert data.partition("=")[0] in [name for name, *_ in find_recipe_changes(run)]


def refused(*words, accelerator="cpu", group=None, **values):
    """What the early checks say of these overrides; None where they pass.

    Args:
        values: of a group of the config, or of its top.
    """
    config = config_of(*words)
    (config if group is None else config[group]).update(values)
    try:
        check_before_start(config, replace(ALONE, accelerator=accelerator))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("decay", [-0.1, 1, 1.5, float("nan"), float("inf")])
def test_a_decay_outside_zero_to_one_is_refused(decay):
    said = refused("data=digits", group="trainer", ema_decay=decay)
    assert "give a number from 0 to below 1" in said


@pytest.mark.parametrize("decay", [0, 0.999, None])
def test_a_decay_that_is_a_share_is_taken(decay):
    assert refused("data=digits", group="trainer", ema_decay=decay) is None


def test_arms_need_a_sweep():
    assert "add -m and seed=1,2,3" in refused("data=digits", "against=baseline")


@pytest.mark.parametrize("data", ["image_folder", "csv", "webdataset"])
def test_a_root_that_is_not_there_is_refused(data, tmp_path):
    said = refused(f"data={data}", group="data", root=f"{tmp_path}/nowhere")
    assert said.startswith(f"data.root={tmp_path}/nowhere does not exist: give a folder or file")
    for root in (str(tmp_path), None, "s3://bucket/nowhere"):
        assert refused(f"data={data}", group="data", root=root) is None


@pytest.mark.parametrize("data", ["cifar10", "mnist", "digits"])
def test_a_source_that_makes_its_root_is_taken(data):
    """torchvision downloads into a new folder; a class of the user's may write one."""
    assert refused(f"data={data}", group="data", root="nowhere") is None


def test_what_is_refused_is_refused_without_torch(tmp_path):
    words = ["data=image_folder", "data.root=nowhere", "trainer=cpu", f"paths.log_dir={tmp_path}"]
    code = f"import sys; sys.modules['torch'] = None; import train; sys.exit(train.main({words}))"
    path = {"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "data.root=nowhere does not exist" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("key", "value"), [("max_epochs", -1), ("max_epochs", 0), ("limit_train_batches", 0)]
)
def test_a_length_of_nothing_is_refused(key, value):
    said = refused("trainer=cpu", group="trainer", **{key: value})
    assert said.startswith(f"trainer.{key}={value}") and "give " in said


def test_another_id_for_a_resumed_run_is_refused():
    said = refused("trainer=cpu", resume="a", run_id="b")
    assert "under its own id: leave run_id=b out" in said
    assert refused("trainer=cpu", resume="logs/a/", run_id="a") is None


def test_a_long_temporary_folder_is_refused(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 100)
    assert "too long for the sockets" in refused("trainer=cpu")


@pytest.mark.parametrize("words", [[], ["seed=3"], ["trainer.max_epochs=1"], ["ckpt_path=r"]])
def test_a_training_of_days_on_a_cpu_is_refused(words):
    said = refused(overrides=words)
    assert "vit_base_patch32_224 on cifar10 at 224 pixels" in said
    assert "make train (experiment=quickstart)" in said
    assert refused(overrides=words, accelerator="gpu") is None


@pytest.mark.parametrize(
    "word",
    [
        "trainer=cpu",
        "trainer=ddp_sim",
        "experiment=vit_ddp",
        "model=small_cnn",
        "data=digits",
        "debug=fast_dev_run",
        "resume=r",
        "trainer.max_steps=2",
        "trainer.accelerator=cpu",
    ],
)
def test_a_training_on_a_cpu_that_somebody_chose_begins(word):
    assert refused(overrides=[word]) is None


def test_the_lines_that_a_run_says_of_its_plan(tmp_path):
    plan = run_of(tmp_path / "r", *SCALED)
    scaled = "optimizer: lr 0.1 → 0.4 (global batch 64 / base_batch_size 16)"
    batch = "global batch 64 = 32 × 2 × 1 · resume exact in mid-epoch"
    assert format_headlines(plan) == [f"run r · small_cnn · digits · ddp_sim · {batch}", scaled]
    with pytest.raises(UserError, match="base_batch_size=0: give a whole number"):
        format_headlines(run_of(tmp_path / "r", *SCALED, "optimizer.base_batch_size=0"))
    default = replace(
        plan, config={**plan.config, "choices": {**plan.choices, "trainer": "default"}}
    )
    assert format_headlines(default)[0] == f"run r · small_cnn · digits · default (cpu) · {batch}"
    evaluation = replace(plan, config={**plan.config, "task_name": "eval"})
    batch = plan.config["data"]["eval_batch_size"]
    assert format_headlines(evaluation) == [
        f"run r · small_cnn · digits · ddp_sim · batches of {batch}"
    ]
    assert format_headlines(run_of(tmp_path / "r", "callbacks=none"))[0].endswith(
        " · WITHOUT CHECKPOINTS"
    )


OWN_DATA = """
import lightning.pytorch as pl
import lockstep.data.image_datamodule as images
from data.digits import DigitsDataModule

class Plain(pl.LightningDataModule):
    def train_dataloader(self): ...

class Fewer(DigitsDataModule): ...

class Half(Fewer): ...

class Own(images.ImageDataModule): ...
"""


def test_own_data_count_by_what_their_class_can_do(tmp_path, monkeypatch):
    """All of them lie in src/data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.py").write_text(OWN_DATA)
    for folder in ("lockstep", "data/digits.py"):
        (tmp_path / folder).symlink_to(class_source.SOURCE / folder)
    monkeypatch.setattr(class_source, "SOURCE", tmp_path)

    def first_line(name):
        plan = run_of(tmp_path / "r", f"data._target_=data.mine.{name}")
        return format_headlines(plan)[0]

    for name in ("Fewer", "Half", "Own"):
        assert "global batch 128 = 64 × 2 × 1 · resume exact in mid-epoch" in first_line(name)
    plain = first_line("Plain")
    assert plain.endswith(
        "ddp_sim · resume exact, in mid-epoch by reading the epoch's batches again"
    )


def test_the_largest_batch_takes_the_place_of_max(tmp_path):
    asked = []

    def search(config, cluster, smallest):
        asked.append(smallest)
        return {"global": 512}

    config = config_of(*WORDS, "data.global_batch_size=max", "trainer.accumulate_grad_batches=2")
    cluster = find_ranks(config, {})
    batch, result = decide_batch(config, cluster, RunRecord(), {}, search)
    assert batch == Batch(512, 128, 2) and result == {"global": 512} and asked == [Batch(4, 1, 2)]
    before = Run(config, cluster, RunFolder(tmp_path / "r"), batch).effective_config()
    again, result = decide_batch(config, cluster, RunRecord(), before, search)
    assert again == batch and not result and len(asked) == 1, "a run that goes on keeps its size"


def test_no_micro_batches_are_refused_by_their_own_option():
    config = config_of(*WORDS, "data.global_batch_size=max", f"{ACCUMULATION}=0")
    with pytest.raises(UserError, match=f"{ACCUMULATION}=0: give a whole number from 1 on"):
        resolve_batch(config, ALONE)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("lockstep.ranks.find.count_visible_gpus", lambda environ: 1)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1",
             "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a"}  # fmt: skip
    with pytest.raises(UserError, match="4 ranks on this node see 1 GPU: "):
        find_ranks(config_of("trainer=ddp"), slurm)


@pytest.mark.parametrize(
    ("words", "idle"), [([], "2 GPUs"), (["trainer.devices=2"], ""), (["trainer=cpu"], "")]
)
def test_idle_gpus_of_a_node_are_named(words, idle, monkeypatch, caplog):
    monkeypatch.setattr("lockstep.ranks.find.count_visible_gpus", lambda environ: 4)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
             "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a,b"}  # fmt: skip
    if words == ["trainer=cpu"]:
        slurm["SLURM_STEP_NUM_TASKS"] = "1"
        slurm["SLURM_STEP_NUM_NODES"] = "1"
    find_ranks(config_of("trainer=ddp", *words), slurm)
    assert ("stay idle: slurm started 2 ranks" in caplog.text) == bool(idle)
    assert idle in caplog.text


@pytest.mark.parametrize(
    ("fields", "words", "wanted"),
    [
        ({"per_device_batch_size": 32}, [], Batch(64, 32, 1)),
        ({"per_device_batch_size": 32}, ["trainer.devices=1"], Batch(64, 32, 2)),
        (
            {"per_device_batch_size": 16, "per_device_batch_limit": 32},
            ["trainer.devices=1"],
            Batch(64, 32, 2),
        ),
        (
            {"per_device_batch_size": 16},
            ["trainer.devices=1", "trainer.accumulate_grad_batches=1"],
            Batch(64, 64, 1),
        ),
        ({}, ["trainer.devices=1"], Batch(64, 64, 1)),  # of a record that says nothing
        (
            {"per_device_batch_size": 24},
            ["trainer.devices=1", "data.global_batch_size=max"],
            Batch(96, 24, 4),
        ),
    ],
)
def test_a_resumed_run_keeps_the_images_of_a_device(tmp_path, fields, words, wanted):
    write_record(RunFolder(tmp_path).record_path, RunRecord(**fields))
    (tmp_path / "config.yaml").write_text("data: {global_batch_size: 96}\nmodel: {}\ntrainer: {}\n")
    assert run_of(tmp_path, "resume=auto", "run_id=r", *words).batch == wanted


def test_loaders_of_the_user_do_not_divide_over_ranks():
    config = config_of("data=none", "trainer=ddp_sim")
    three_ranks = replace(ALONE, ranks_per_node=3)
    record = RunRecord(world_size=4, accumulate_grad_batches=1, per_device_batch_size=1)
    with pytest.raises(UserError, match="4 batches of your own loaders, .* 3 ranks") as refused:
        decide_batch(config, three_ranks, record, {}, pytest.fail)
    assert ACCUMULATION in str(refused.value) and "global_batch_size" not in str(refused.value)


def test_a_second_process_neither_trains_nor_harms_a_run(tmp_path, capsys):
    first = hold_run_lock(RunFolder(tmp_path / "r"))
    with pytest.raises(UserError, match="r is still trained by another process"):
        hold_run_lock(RunFolder(tmp_path / "r"), wait_s=0.6)
    assert "waiting for it to end" in capsys.readouterr().out
    first.close()
    hold_run_lock(RunFolder(tmp_path / "r"), wait_s=5).close()


def test_a_run_of_steps_alone_ends_by_its_steps():
    trainer = {"max_epochs": None, "max_steps": 9, "max_time": None}
    stopped, ended = (
        RunRecord(status="interrupted", epochs=1, steps=5),
        RunRecord(status="finished", epochs=1, steps=9),
    )
    over = [
        find_reached_limit({"trainer": trainer}, {"trainer": trainer}, record)
        for record in (stopped, ended)
    ]
    assert over == [None, "steps"]


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/r cannot be written .*paths.log_dir="):
        hold_run_lock(RunFolder(tmp_path / "file" / "r"))


class Waiting(Exception):
    pass


@pytest.mark.parametrize("error", [UserError("r is trained elsewhere"), Waiting()])
def test_who_waits_in_vain_leaves_the_run_alone(error, tmp_path, monkeypatch):
    words = ["experiment=quickstart", "trainer=cpu", "run_id=r", f"paths.log_dir={tmp_path}"]
    config = config_of(*words)
    folder = RunFolder(tmp_path / "train" / "runs" / "r")
    folder.path.mkdir(parents=True)
    write_record(folder.record_path, RunRecord(run_id="r", status="running"))

    def wait_in_vain(*_):
        raise error

    monkeypatch.setattr("lockstep.runs.opening.hold_run_lock", wait_in_vain)
    with pytest.raises(CommandEnded), open_run(config, find_ranks(config, {})):
        pass
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]
    assert read_record(folder.record_path).status == "running"


def test_a_library_that_calls_exit_fails_the_run(tmp_path, monkeypatch):
    words = ["experiment=quickstart", "trainer=cpu", "run_id=r", f"paths.log_dir={tmp_path}"]
    config = config_of(*words)

    def leave(_):
        sys.exit(0)

    monkeypatch.setattr("lockstep.runs.opening.format_headlines", leave)
    with pytest.raises(CommandEnded) as ended, open_run(config, find_ranks(config, {})):
        pass
    record = read_record(RunFolder(tmp_path / "train" / "runs" / "r").record_path)
    assert ended.value.exit_code == 1
    assert (record.status, record.exit_code) == ("failed", 1)
    assert "SystemExit" in record.error["message"]


@pytest.mark.parametrize(
    ("limit", "before", "is_refused"), [(100, 1, True), (100, 2, False), (0.5, 1, False)]
)
def test_a_limit_in_micro_batches_keeps_the_epoch(limit, before, is_refused):
    config = config_of(*WORDS, f"trainer.limit_train_batches={limit}")
    record = RunRecord(accumulate_grad_batches=before)
    batch = Batch.cut(64, 1, 2)
    refused = pytest.raises(UserError, match="counts micro-batches, of which a step had 1")
    with refused if is_refused else contextlib.nullcontext():
        refuse_other_epoch(config, record, batch)

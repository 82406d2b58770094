"""Data, model and checkpoint against each other, before a run trains.

Torch.compile; loggers over a resume.
"""

import shutil
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from local_ranks import run_ranks
from lockstep.config.compose import chosen_options, compose, plain
from lockstep.process.errors import UserError
from lockstep.ranks.find import Cluster, find_ranks
from lockstep.ranks.process_group import create_process_group
from lockstep.records.batch import Batch
from lockstep.records.folder import RunFolder
from lockstep.runs.batch_size import resolve_batch
from lockstep.runs.join import EXPECTED_WARNINGS
from lockstep.runs.run import Run
from lockstep.strategies.base import Capabilities
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.training import build
from lockstep.training.build import build_loggers, build_strategy, prepare_net
from lockstep.training.build_data import (
    build_data,
    build_prepared_data,
    check_same_data_on_ranks,
    data_facts,
)
from lockstep.training.inference import load_data
from lockstep.training.task import Task
from models.timm import TimmModel
from plain_task import Small, fit
from runs import run_script, succeed

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
SMALL = [
    "experiment=quickstart",
    "trainer.max_epochs=2",
    "trainer.num_threads=1",
    "run_id=r",
    "~callbacks.hardware",
]


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("fsdp_sim", marks=pytest.mark.slow)])
def test_a_net_with_other_outputs_is_refused_before_a_step(tmp_path, trainer):
    done = run_script("train", *SMALL, f"trainer={trainer}", "+model.num_classes=7", logs=tmp_path)
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert (
        "error: The model gives 7 logits for an image and the data have 10 classes" in done.output
    )
    assert not (tmp_path / "train/runs/r").exists()  # no step was made


class Held:
    num_train, num_test = 90, 10

    def __init__(self, num_val):
        self.num_val = num_val


def with_data(here, images, num_val):
    import torch

    create_process_group(here, torch.device("cpu"), 30.0)
    try:
        # A node without tifffile reads 8 of 16 bits.
        pixels = {"range": None} if images[here.rank] == "c" else {"range": [0, 4095]}
        facts = {"data_hash": images[here.rank].replace("c", "a"), **pixels}
        check_same_data_on_ranks(facts, Held(num_val[here.rank]), here)
        return "same"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(("images", "num_val"), [("ab", [5, 5]), ("aa", [5, 4]), ("aa", [5, 5])])
def test_other_images_on_one_node_are_named_to_every_rank(images, num_val):
    first, second = run_ranks(with_data, 2, images, num_val)
    said = (
        f"90 training, {num_val[1]} validation, 10 test, hash {images[1]}, instead of 90, 5, 10, a"
    )
    assert first == second and (
        first == "same" if num_val == [5, 5] and images == "aa" else said in first
    )


def test_other_pixels_on_one_node_are_named_to_every_rank():
    first, second = run_ranks(with_data, 2, "ac", [5, 5])
    assert first == second and "as other pixels than rank 0" in first
    assert "(range [0, 4095], now None)" in first


def other_images():
    from lockstep.training import build

    facts = build.data_facts
    build.data_facts = lambda data: {**facts(data), "data_hash": "b" * 64}


def test_only_a_resume_asks_for_the_images_of_its_run(
    tmp_path,
):
    short = [*SMALL, "trainer.limit_train_batches=2"]
    first = succeed("train", *short, logs=tmp_path)
    more = [*short, "trainer.max_epochs=3"]
    again = run_script("train", *more, "resume=auto", logs=tmp_path, before=other_images)
    assert again.code == 2 and "The run r was trained on other images (hash " in again.output
    best = first.folder.path / first.record["best_checkpoint"]["path"]
    succeed("train", *more, f"ckpt_path={best}", "run_id=other", logs=tmp_path, before=other_images)


def test_images_are_normalised_as_those_that_the_weights_have_seen(tmp_path):
    short = [*SMALL, "trainer.limit_train_batches=2", "trainer.max_epochs=1"]
    succeed("train", *short, "data.mean=0.3", "data.std=0.2", logs=tmp_path)

    start = [*short, "run_id=start", "ckpt_path=r", "data.std=null"]
    first = succeed("train", *start, logs=tmp_path)
    assert "mean 0.3 · std 0.376 · the weights say mean, crop_pct, interpolation" in first.output
    again = succeed("train", "resume=start", "trainer.max_epochs=2", logs=tmp_path)
    assert "mean 0.3 · std 0.376" in again.output
    tested = succeed("eval", "ckpt_path=start", logs=tmp_path)
    assert tested.record["metrics"]["test/loss"] == again.record["metrics"]["test/loss"]
    assert load_data("start", tmp_path).mean == [0.3]


def test_batchnorm_beside_the_net_is_synchronised_too():
    module = pl.LightningModule()
    module.net, module.projector = torch.nn.BatchNorm2d(2), torch.nn.BatchNorm1d(2)
    cluster = SimpleNamespace(world_size=2, accelerator="cpu")
    run = SimpleNamespace(trainer_config={"sync_batchnorm": True}, cluster=cluster)
    prepare_net(module, None, run, "auto", is_compiled=False)
    assert isinstance(module.net, SyncBatchNorm) and isinstance(module.projector, SyncBatchNorm)


@pytest.mark.parametrize(
    ("resize", "crop_pct", "taken"), [(224, 0.9, 1.0), (248, 0.9, 0.9), (256, 1.0, 0.875)]
)
def test_weights_bring_the_crop_that_they_have_seen(resize, crop_pct, taken):
    words = [
        "data=synthetic",
        "data.image_size=224",
        "data.num_images=20",
        "data.num_test_images=4",
    ]
    config = plain(compose("train", [*words, "data.global_batch_size=4", "model=small_cnn"]))
    facts = {"channels": 3, "image_size": 224, "resize": resize, "crop_pct": crop_pct}
    data = build_prepared_data(config, config["data"], checkpoint_facts=facts)
    assert data.framing.resize == resize and data_facts(data)["crop_pct"] == taken
    resized = build_prepared_data(config, {**config["data"], "resize": 448})
    assert data_facts(resized)["crop_pct"] == 0.5


@pytest.mark.parametrize(
    ("choice", "typed", "sentence"),
    [
        ("none", "data.fold=1", "data.fold=1 is an option of Lockstep's data modules"),
        ("none", "augmentation=rand_augment", "and data=none makes batches of its own"),
        ("own", "augmentation.flip=false", "data._target_=plain_task.Numbers makes batches of"),
    ],
)
def test_options_that_own_data_would_ignore_are_refused(choice, typed, sentence):
    data = {"fold": 1} if "fold" in typed else {"_target_": "plain_task.Numbers"}
    config = {"data": data, "overrides": [typed]}
    batch = SimpleNamespace(global_size=4)
    run = SimpleNamespace(config=config, choices={"data": choice}, cluster=None, batch=batch)
    with pytest.raises(UserError, match=sentence):
        build_data(run, {}, is_training=True)


@pytest.mark.parametrize(
    ("trainer", "compiled"),
    [
        pytest.param("cpu", "{backend: aot_eager, mode: default}", marks=pytest.mark.slow),
        *(
            pytest.param(name, "{backend: aot_eager}", marks=pytest.mark.slow)
            for name in ("ddp_sim", "fsdp_sim")
        ),
        *(
            pytest.param(name, "true", marks=[pytest.mark.slow, needs_compiler])
            for name in ("cpu", "ddp_sim")
        ),
    ],
)
def test_a_compiled_net_learns_the_same(trainer, compiled, tmp_path):
    words = [*SMALL, f"trainer={trainer}", "trainer.max_steps=3", "trainer.max_epochs=1"]
    words += ["model.dropout=0", "model.head_dropout=0"]  # inductor draws other numbers
    runs = [run_script("train", *words, f"trainer.compile={option}", logs=tmp_path / str(i))
            for i, option in enumerate(("false", compiled))]  # fmt: skip
    assert all(done.code == 0 for done in runs), [done.output for done in runs]
    losses = [done.record["metrics"]["val/loss"] for done in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert [done.record["compiled"] for done in runs] == [None, True]


def test_without_a_compiler_it_is_one_sentence(tmp_path):
    words = [*SMALL, "trainer.compile=true"]
    done = run_script("train", *words, logs=tmp_path, environment={"CXX": "no-such-compiler"})
    assert (
        done.code == 2
        and "trainer.compile needs a C++ compiler on a CPU, and no-such-compiler" in done.output
    )


def test_compile_is_refused_where_one_process_has_several_devices(tmp_path):
    words = [
        "data=digits",
        "trainer.compile=true",
        "trainer=model_parallel",
        "trainer.stage_devices=[cpu,cpu]",
    ]
    cfg = compose("train", [*words, f"paths.log_dir={tmp_path}"])
    config = {**plain(cfg), "choices": chosen_options(cfg), "overrides": words}
    cluster = find_ranks(config, {})
    batch = resolve_batch(config, cluster)
    with pytest.raises(UserError, match="trainer.compile=true needs one device a process"):
        build_strategy(Run(config, cluster, RunFolder(tmp_path), batch))


def test_each_step_is_shown_once_over_all_restarts(tmp_path):
    folder, config = (
        RunFolder(tmp_path / "r"),
        plain(compose("train", ["data=digits", "model=small_cnn"])),
    )
    folder.path.mkdir()
    for resume_step, steps, value in ((None, range(1, 7), 0.0), (4, range(5, 9), 100.0)):
        cluster = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
        for logger in build_loggers(
            Run(config, cluster, folder, Batch(8, 8, 1), resume_step=resume_step)
        ):
            for step in steps:
                logger.log_metrics({"train/loss": value + step}, step)
            logger.finalize("success")
    events = EventAccumulator(str(folder.tensorboard)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 105.0), (6, 106.0), (7, 107.0), (8, 108.0)
    ]  # fmt: skip
    assert [line.split(",")[0] for line in folder.metrics.read_text().splitlines()[1:]] == list(
        "12345678"
    )


def digits_of(task, cache_dir):
    """Digits for a ResNet, prepared as its pretrained weights say."""
    config = {
        "task": {"_target_": task}, "model": {"_target_": "models.timm.TimmModel", "name": "resnet18"}, "seed": 0,
        "augmentation": {"_target_": "lockstep.data.augmentation.CropFlip"}, "s3": {},
    }  # fmt: skip
    images = {"crop_pct": "auto", "interpolation": "auto", "mean": "auto", "std": "auto"}
    return build_prepared_data(
        config, {"_target_": "data.digits.DigitsDataModule", "cache_dir": cache_dir, **images}
    )


@pytest.mark.parametrize(
    ("task", "from_weights"), [("tasks.classifier.ImageClassifier", 4), ("plain_task.Small", 0)]
)
def test_weights_of_a_model_without_use_set_no_images(task, from_weights, tmp_path):
    assert len(digits_of(task, tmp_path).normalisation.from_weights) == from_weights


@pytest.mark.parametrize("hook", ["image_settings", "wanted_images"])
def test_a_model_says_its_images_under_either_name(hook, tmp_path, monkeypatch):
    monkeypatch.setattr(TimmModel, hook, classmethod(lambda cls, **options: {"crop_pct": 0.5}))
    data = digits_of("tasks.classifier.ImageClassifier", tmp_path)
    assert list(data.normalisation.from_weights) == ["crop_pct"]


class LogsPlainly(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val/plain", 0.5)


class CountsExactly(Task):
    def __init__(self):
        super().__init__(net=torch.nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.count(exact=torch.ones(2))

    configure_optimizers = Small.configure_optimizers


@pytest.mark.parametrize(
    ("module_class", "has_advice"), [(LogsPlainly, True), (CountsExactly, False)]
)
def test_only_a_task_logs_without_the_advice_to_synchronise(module_class, has_advice, recwarn):
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fit(module_class(), val_loader=DataLoader(torch.ones(1, 2)))
    finally:
        torch.distributed.destroy_process_group()
    assert any("sync_dist" in str(warning.message) for warning in recwarn) == has_advice


@pytest.mark.parametrize("attribute", ["replicas", "micro_batches"])
def test_batchnorm_of_parts_cannot_be_synchronised(attribute, monkeypatch):
    strategy = type("Parts", (Capabilities,), {attribute: 4})()
    monkeypatch.setattr(build, "build_node", lambda node: strategy)
    options = {"strategy": {"_target_": "a.B"}, "compile": False, "ema_decay": None}
    run = SimpleNamespace(trainer_config={**options, "sync_batchnorm": True})
    with pytest.raises(UserError, match="Parts normalises each of 4 parts of a batch by itself"):
        build.build_strategy(run)
    run.trainer_config["sync_batchnorm"] = False
    assert build.build_strategy(run) is strategy


@pytest.mark.parametrize(
    ("accumulate", "clip", "said"),
    [
        (2, None, "give trainer.accumulate_grad_batches=1"),
        (1, 1.0, "leave trainer.gradient_clip_val out"),
    ],
)
def test_options_of_automatic_optimization_are_refused(accumulate, clip, said):
    module = SimpleNamespace(automatic_optimization=False)
    run = SimpleNamespace(
        batch=SimpleNamespace(accumulate=accumulate), trainer_config={"gradient_clip_val": clip}
    )
    with pytest.raises(UserError, match=said):
        build._refuse_automatic_options(module, run)
    module.automatic_optimization = True
    build._refuse_automatic_options(module, run)

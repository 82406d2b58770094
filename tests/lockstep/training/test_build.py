"""Data, model and checkpoint against each other, before a run trains."""

from types import SimpleNamespace

import pytest
import torch

from local_ranks import run_ranks
from lockstep.config.compose import chosen_options, compose, plain
from lockstep.launch.plan import RunPlan, resolve_batch, resolve_cluster
from lockstep.launch.process_group import join
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.training.build import build_strategy, prepare_net, validation_interval, whole_steps
from lockstep.training.build_data import build_data, check_same_data, data_facts
from lockstep.training.build_module import build_module
from lockstep.training.rank import RankSession
from lockstep.training.weights import check_data_of_run
from runs import run_door
from tasks.classifier import check_logits

SMALL = ["experiment=quickstart", "trainer=cpu", "trainer.max_epochs=2", "trainer.num_threads=1", "run_id=r",
         "~callbacks.hardware"]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "batches", "accumulate", "wanted"),
    [
        (1.0, 40, 4, 1.0),
        (10, 40, 4, 8),
        (0.25, 40, 4, 8),
        (8, 40, 4, 8),
        (100, 40, 4, 100),
        (3, 40, 1, 3),
        (0, 40, 4, 0),
    ],
)
def test_an_epoch_ends_with_a_whole_step(limit, batches, accumulate, wanted):
    assert whole_steps(limit, batches, accumulate) == wanted


def test_less_than_one_step_is_refused():
    with pytest.raises(UserError, match="leaves 3 micro-batches and a step takes 4: give at least 4"):
        whole_steps(3, 40, 4)


@pytest.mark.parametrize(
    ("stated", "batches", "accumulate", "wanted"),
    [
        (1.0, 20, 1, 1.0), (0.25, 20, 1, 5), (0.25, 40, 2, 10), (0.3, 20, 1, 6), (0.25, 10, 1, 3), (0.1, 30, 1, 3),
        (0.001, 20, 2, 2), (5, 20, 1, 5), (5, 20, 4, 20.0), (5, 24, 4, 20), (1, 20, 2, 2), (20, 20, 1, 1.0),
        (1.0, 0, 1, 1.0),
    ],
)  # fmt: skip
def test_an_interval_is_stated_in_steps_and_told_to_lightning_in_micro_batches(stated, batches, accumulate, wanted):
    found = validation_interval(stated, batches, accumulate)
    assert found == (1.0 if wanted == batches else wanted) and type(found) is type(1.0 if found == 1.0 else 1)


@pytest.mark.parametrize("stated", [0, 0.0, 1.5, 11, -1, True, "often", "00:00:15:00"])
def test_what_is_no_interval_is_refused(stated):
    with pytest.raises(UserError, match="trainer.val_check_interval=.* from 1 to 10, which is an epoch"):
        validation_interval(stated, 20, 2)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((4, 10), "gives 10 logits for an image and the data have 3 classes"),
        ((4, 1), "gives 1 logits"),
        ((4, 3, 1, 1), r"gives outputs of the shape \(3, 1, 1\)"),
        ((4,), r"gives outputs of the shape \(\)"),
    ],
)
def test_a_net_with_another_number_of_outputs_is_refused(shape, said):
    with pytest.raises(UserError, match=said):
        check_logits(torch.zeros(shape), 3)
    check_logits(torch.zeros(4, 3), 3)
    for outputs in ((torch.zeros(4, 3), torch.zeros(4, 3)), {"logits": torch.zeros(4, 3)}):
        with pytest.raises(UserError, match=f"The model returns a {type(outputs).__name__}: let its forward return"):
            check_logits(outputs, 3)


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("fsdp_sim", marks=pytest.mark.slow)])
def test_a_run_of_such_a_net_ends_before_its_first_step_with_a_sentence(tmp_path, trainer):
    words = [word for word in SMALL if word != "trainer=cpu"]
    done = run_door("train", *words, f"trainer={trainer}", "+model.num_classes=7", logs=tmp_path)
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert "error: The model gives 7 logits for an image and the data have 10 classes" in done.output
    assert not (tmp_path / "train/runs/r").exists()  # no step was made


def with_data(here, images, num_val):
    join(here, torch.device("cpu"), 30.0)
    data = SimpleNamespace(num_train=90, num_val=num_val[here.rank], num_test=10)
    try:
        check_same_data({"data_hash": images[here.rank]}, data, here)
        return "same"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(("images", "num_val"), [(["a", "b"], [5, 5]), (["a", "a"], [5, 4])])
def test_other_images_on_one_node_are_named_to_every_rank(images, num_val):
    answers = run_ranks(with_data, 2, images, num_val)
    assert answers[0] == answers[1]
    assert f"90 training, {num_val[1]} validation, 10 test, hash {images[1]}, instead of 90, 5, 10, a" in answers[0]
    assert run_ranks(with_data, 2, ["a", "a"], [5, 5]) == ["same", "same"]


def test_a_run_does_not_go_on_with_other_images(tmp_path):
    folder = RunFolder(tmp_path / "r")
    checkpoint = {"lockstep": {"data": {"data_hash": "a" * 64}}}
    check_data_of_run(checkpoint, {"data_hash": "a" * 64}, folder)
    check_data_of_run({}, {"data_hash": "a" * 64}, folder)
    with pytest.raises(
        UserError, match="The run r was trained on other images .hash aaaaaaaaaaaa, now hash bbbbbbbbbbbb"
    ):
        check_data_of_run(checkpoint, {"data_hash": "b" * 64}, folder)


def other_images():
    from lockstep.training import build

    facts = build.data_facts
    build.data_facts = lambda data: {**facts(data), "data_hash": "b" * 64}


@pytest.mark.slow
def test_a_run_that_goes_on_asks_for_its_images_and_a_new_one_from_its_checkpoint_does_not(tmp_path):
    first = run_door("train", *SMALL, logs=tmp_path)
    assert first.code == 0, first.output
    more = [*SMALL, "trainer.max_epochs=3"]
    again = run_door("train", *more, "resume=auto", logs=tmp_path, before=other_images)
    assert again.code == 2 and "The run r was trained on other images" in again.output
    best = first.folder.path / first.record["best_checkpoint"]["path"]
    other = run_door("train", *more, f"ckpt_path={best}", "run_id=other", logs=tmp_path, before=other_images)
    assert other.code == 0, other.output


@pytest.mark.parametrize(
    "trainer", ["cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp_sim", "fsdp_sim"))]
)
def test_a_compiled_net_learns_the_same_under_one_device_ddp_and_fsdp(trainer, tmp_path):
    words = [word for word in SMALL if word != "trainer=cpu"] + [f"trainer={trainer}", "trainer.max_steps=3"]
    plain, compiled = (
        run_door("train", *words, "trainer.max_epochs=1", *more, logs=tmp_path / f"{len(more)}")
        for more in ((), ("trainer.compile={backend: aot_eager, mode: default}",))
    )
    assert compiled.code == 0, compiled.output
    assert compiled.record["metrics"]["val/loss"] == pytest.approx(plain.record["metrics"]["val/loss"], rel=1e-4)


def test_a_compiled_net_is_asked_for_and_refused_where_one_process_has_several_devices(tmp_path):
    def planned(overrides, folder):
        cfg = compose("train", [*overrides, f"paths.data_dir={folder}/data", f"paths.log_dir={folder}/logs"])
        config, choices = plain(cfg), chosen_options(cfg)
        cluster, accelerator = resolve_cluster(config, choices["trainer"], {})
        batch = resolve_batch(config, cluster)
        return RunPlan(config, choices, tuple(overrides), cluster, accelerator, RunFolder(folder), batch)

    words = ["experiment=quickstart", "trainer.compile=true", f"data.cache_dir={tmp_path}", "~callbacks.checkpoints"]
    plan = planned([*words, "trainer=cpu"], tmp_path)
    data = build_data(plan, RankSession(plan, []))
    module = build_module(plan.config, data_facts(data))
    prepare_net(module, data, plan, build_strategy(plan))
    assert module.net._compiled_call_impl is not None
    plan = planned([*words, "trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"], tmp_path)
    with pytest.raises(UserError, match="trainer.compile=true needs one device a process"):
        build_strategy(plan)

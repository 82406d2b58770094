"""Estimates on fake tensors against the tracked bytes of real ranks."""

import pytest

from lockstep.batch_size import estimate
from lockstep.batch_size.ddp_buckets import in_buckets
from lockstep.batch_size.search import HELD
from lockstep.runs.config import writable
from lockstep.runs.errors import UserError
from memory_runs import peaks, planned
from runs import run_door

FACTS = {"num_classes": 10, "image_size": 32, "channels": 3}
TINY = ["data=synthetic", "data.num_images=300", "data.num_test_images=20", "data.eval_batch_size=4"]


def peak(phases):
    return max(phases.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "ranks", "options"),
    [
        ("cpu", 1, ["optimizer=adamw"]),
        pytest.param("cpu", 1, ["trainer.accumulate_grad_batches=2"], marks=pytest.mark.slow),
        ("ddp_sim", 2, []),
        pytest.param("allreduce_sim", 2, ["optimizer=sgd"], marks=pytest.mark.slow),
        ("fsdp_sim", 2, []),
        pytest.param("fsdp_sim", 4, ["trainer.devices=4"], marks=pytest.mark.slow),
    ],
)
def test_within_one_percent_of_a_real_run(trainer, ranks, options, tmp_path):
    plan = planned([*TINY, "model=vit_tiny_32", "model.depth=2", f"trainer={trainer}", *options], tmp_path)
    [first, *_] = peaks(plan, tmp_path, ranks, [16])
    if ranks > 1:
        estimate.peak_bytes(plan, FACTS, 1)
    estimated = estimate.peak_bytes(plan, FACTS, 16)
    assert peak(estimated) == pytest.approx(peak(first[0]), rel=0.01)
    assert estimated[HELD] == pytest.approx(first[0][HELD], rel=0.02)


@pytest.mark.slow
def test_more_ranks_hold_less_each_under_fsdp(tmp_path):
    held = {}
    for ranks in (2, 8, 32):
        plan = planned([*TINY, "model=small_cnn", "trainer=fsdp_sim"], tmp_path, ranks)
        estimate.peak_bytes(plan, FACTS, 1)
        held[ranks] = estimate.peak_bytes(plan, FACTS, 1)[HELD]
    assert held[2] / held[8] == pytest.approx(4, rel=0.05) and held[8] / held[32] == pytest.approx(4, rel=0.2)


def test_buckets_are_those_of_ddp():
    import torch
    from torch import nn

    megabyte = 2**18
    parameters = [nn.Parameter(torch.empty(int(size * megabyte))) for size in (0.5, 0.4, 0.3, 20, 4, 2, 1)]
    grouped = [[p.numel() / megabyte for p in bucket] for bucket in in_buckets(parameters, 25)]
    assert [[round(size, 1) for size in bucket] for bucket in grouped] == [[0.5, 0.4, 0.3], [20, 4, 2], [1]]


def test_the_world_and_the_limit_come_from_the_options(tmp_path, capsys):
    options = ["model=small_cnn", "data=synthetic", "trainer=cpu", "hardware=g4dn.12xlarge"]
    config = writable(planned(options, tmp_path).config)
    config["trainer"].update(launch="process_per_device", devices="auto", num_nodes=8, accelerator="gpu")
    assert estimate.stated_cluster(config, "ddp").world_size == 32
    assert estimate.stated_limit_gib(config) == pytest.approx(15.0 - estimate.RUNTIME_GIB)
    config["trainer"]["memory_fraction"], config["trainer"]["memory_limit_gib"] = 0.5, 6
    assert estimate.stated_limit_gib(config) == 3
    config["trainer"].update(memory_limit_gib=None, devices=4)
    assert estimate.stated_limit_gib(config) == pytest.approx(7.5 - estimate.RUNTIME_GIB)
    assert estimate.stated_cluster(config, "ddp").world_size == 32 and capsys.readouterr().out == ""
    config["trainer"]["devices"] = 8
    assert estimate.stated_cluster(config, "ddp").world_size == 64
    said = "A g4dn.12xlarge has 4 GPUs: this is for 8 such GPUs on each node, as asked.\n"
    assert capsys.readouterr().out == said
    config["hardware"] = {}
    with pytest.raises(UserError, match="--estimate needs to know the memory"):
        estimate.stated_limit_gib(config)


@pytest.mark.slow
def test_a_net_that_refuses_single_images_is_estimated(tmp_path):
    options = ["model=alexnet_bn", "data=synthetic", "data.image_size=127", "trainer=fsdp", "hardware=g4dn.12xlarge"]
    done = run_door("find_batch_size", "--estimate", *options, "trainer.devices=4", logs=tmp_path)
    assert done.code == 0, done.output
    assert "estimated largest batch" in done.output
    tried = [line for line in done.output.splitlines() if " per device: " in line and line.endswith(" GiB")]
    assert len(tried) >= 2 and tried[0].startswith("8 images per device: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "said"), [(1.55, "estimated largest batch"), (0.5, "Not even 2 images, the fewest that the net takes,")]
)
def test_a_net_that_refuses_single_images_is_estimated_where_hardly_any_fit(limit, said, tmp_path):
    options = ["model=alexnet_bn", "data=synthetic", "data.image_size=127", "data.eval_batch_size=1", "trainer=cpu"]
    done = run_door("find_batch_size", "--estimate", *options, f"trainer.memory_limit_gib={limit}", logs=tmp_path)
    assert said in done.output, done.output


@pytest.mark.slow
def test_more_ranks_on_a_node_than_its_gpus_are_answered_with_a_warning(tmp_path):
    options = ["model=small_cnn", "data=synthetic", "trainer=fsdp", "trainer.devices=4", "trainer.num_nodes=8"]
    done = run_door("find_batch_size", "--estimate", *options, "hardware=g4dn.xlarge", logs=tmp_path)
    assert done.code == 0, done.output
    assert "A g4dn.xlarge has 1 GPU: this is for 4 such GPUs on each node, as asked." in done.output
    assert " × 32 × 1 · " in done.output and " at least " not in done.output


def test_an_estimate_that_stops_before_the_memory_does_says_so(tmp_path):
    options = ["model=small_cnn", "data=synthetic", "data.image_size=8", "trainer=cpu", "trainer.memory_limit_gib=4000"]
    done = run_door("find_batch_size", "--estimate", *options, logs=tmp_path)
    assert "estimated largest batch at least 65536 per device, at least 65536 global = 65536 × 1 × 1" in done.output

"""Memory on null GPUs: segments that grow, and the largest batch."""

import os
import random

import pytest
import torch

from lockstep.batch_size import estimate
from lockstep.batch_size.allocator import Stream, column_sum_bytes, workspace_bytes
from lockstep.config.compose import chosen_options, compose, plain
from lockstep.distributed.cluster import Cluster, adopt
from lockstep.runs.config import read_only
from lockstep.training.rank import prepare_process
from memory_runs import allocator_peaks
from null_gpus import call_on_null_gpus, needs_null_gpus, run_on_null_gpus

pytestmark = needs_null_gpus
ALONE = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)


def segments_expand(*stated: tuple[str, str]) -> bool:
    environment = dict(stated)
    adopt(ALONE, environment)
    os.environ.update(environment)
    held = torch.ones(1000, device="cuda")
    [segment] = torch.cuda.memory_snapshot()
    assert held.is_cuda
    return segment["is_expandable"]


@pytest.mark.slow
def test_segments_expand_unless_the_user_says_otherwise():
    assert call_on_null_gpus(segments_expand)
    assert not call_on_null_gpus(segments_expand, ("PYTORCH_ALLOC_CONF", "expandable_segments:False"))
    assert not call_on_null_gpus(segments_expand, ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.9"))


ALEXNET = ("data=synthetic", "data.num_images=4500", "data.image_size=64", "data.device_cache_gib=0", "test=false",
           "data.eval_batch_size=16", "model=alexnet", "trainer.precision=32-true")  # fmt: skip


def bytes_of_a_product() -> int:
    """What the first matrix product leaves in the allocator beside its result."""
    one = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    product = one @ one
    return torch.cuda.memory_allocated() - before - product.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0", "10.0", "12.0"])
def test_what_cublas_has_of_the_allocator(capability):
    assert call_on_null_gpus(bytes_of_a_product, capability=capability) == workspace_bytes(float(capability))


def bytes_beside_sums(shapes: list[tuple[int, int]]) -> list[int]:
    """What the allocator gives out at most while columns are summed, beside matrix and sums."""
    found = []
    for shape in shapes:
        matrix = torch.empty(shape, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sums = matrix.sum(0)
        found.append(torch.cuda.max_memory_allocated() - before - sums.nbytes)
    return found


@pytest.mark.slow
def test_what_a_sum_of_columns_takes():
    shapes = [(33280, 768), (512, 4096), (3200, 3072), (33280, 192), (33280, 10), (1024, 1000), (1020, 1000)]
    seen = call_on_null_gpus(bytes_beside_sums, shapes, compute=False)
    expected = [column_sum_bytes(*shape) for shape in shapes]
    assert expected[0] == 108 * 2**20 and expected[-1] == 0
    for own, other in zip(seen, expected, strict=True):
        assert abs(own - other) <= 8192, (seen, expected)  # semaphores, and whole blocks of 512 bytes


EMPTIES = -1


def reserved_in_turn(events: list[tuple[int, int]]) -> list[int]:
    """What the allocator has reserved after each event.

    Args:
        events: bytes that a number takes, 0 where it lets go of them; EMPTIES gives all back that can be.
    """
    adopt(ALONE, os.environ)
    held, reserved = {}, []
    for number, size in events:
        if number == EMPTIES:
            torch.cuda.empty_cache()
        held[number] = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        reserved.append(torch.cuda.memory_reserved())
    return reserved


def test_the_played_allocator_is_torchs():
    """Blocks of 1 byte to 64 MiB come and go at random; now and then what is free is given back."""
    draw = random.Random(7)
    living, events = [], []
    for number in range(3000):
        if living and draw.random() < 0.5:
            events.append((living.pop(draw.randrange(len(living))), 0))
        living.append(number)
        events.append((number, int(2 ** draw.uniform(0, 26))))
        if draw.random() < 0.4:
            events.append((living.pop(draw.randrange(len(living))), 0))
        if draw.random() < 0.02:
            events.append((EMPTIES, 0))
    played, places, expected = Stream(), {}, []
    for number, size in events:
        if number == EMPTIES:
            played.give_back()
        elif size:
            places[number] = played.take(size)
        else:
            there, start = places.pop(number)
            there.free(start)
        expected.append(played.reserved)
    seen = call_on_null_gpus(reserved_in_turn, events, memory_gib=64, compute=False)
    assert expected[-1] > 2**30 and len(set(expected)) > 30 and sorted(expected) != expected
    assert seen == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "devices", "precision"),
    [("ddp", 1, "32-true"), ("fsdp", 1, "32-true"), ("fsdp", 2, "bf16-mixed"), ("fsdp", 4, "32-true")],
)
def test_the_estimate_is_what_the_allocator_reserves(trainer, devices, precision, tmp_path):
    words = [*ALEXNET, f"trainer={trainer}", f"trainer.devices={devices}", f"paths.log_dir={tmp_path}"]
    words.append(f"trainer.precision={precision}")
    cfg = compose("train", words)
    plan = estimate.stated_plan(read_only(plain(cfg)), chosen_options(cfg))
    [(_, reserved)] = allocator_peaks([(plan, 512)], tmp_path, devices)
    prepare_process(plan)
    facts = estimate.stated_facts(plan.config)
    estimate.peak_bytes(plan, facts, 2)
    estimated = max(estimate.peak_bytes(plan, facts, 512).values())
    assert 0.99 < estimated / reserved < 1.01, (estimated, reserved)


@pytest.mark.slow
def test_ddp_lets_go_of_its_first_bucket_before_the_second_step(tmp_path):
    """Else it is there beside the new buckets in one probe, and not in the next."""
    cfg = compose("train", [*ALEXNET, "trainer=ddp", "trainer.devices=2", f"paths.log_dir={tmp_path}"])
    plan = estimate.stated_plan(read_only(plain(cfg)), chosen_options(cfg))
    peaks = allocator_peaks([(plan, 16)] * 4, tmp_path, 2)
    assert len({allocated for allocated, _ in peaks}) == 1, peaks


BIG = ("data=synthetic", "data.num_images=40000", "model=small_cnn")


def fills(found: dict) -> bool:
    """Hardly more is left than the allocator's gaps, and the search did not need many tries."""
    share = found["peak_memory_gib"] / found["limit_gib"]
    return found["bounded_by"] == "memory" and found["out_of_memory"] <= 2 and 0.87 < share <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_largest_batch_of_two_devices_fills_them(name, tmp_path):
    words = [*BIG, f"trainer={name}"]
    done = run_on_null_gpus("find_batch_size", *words, logs=tmp_path, devices=2, memory_gib=2, compute=False)
    assert done.code == 0 and fills(done.record["largest_batch"]), done.output


@pytest.mark.slow
def test_the_largest_batch_fills_the_device_and_trains(tmp_path):
    words = [*BIG, "trainer=gpu", "data.global_batch_size=max", "test=false", "callbacks=none"]
    own = ["trainer.limit_train_batches=2", "trainer.max_epochs=1", "trainer.limit_val_batches=1"]
    done = run_on_null_gpus("train", *words, *own, logs=tmp_path, memory_gib=2, compute=False)
    assert done.code == 0 and fills(done.record["largest_batch"]), done.output

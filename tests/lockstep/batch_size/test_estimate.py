"""Estimates on fake tensors against what the CUDA allocator reserved for the same steps."""

import pytest

from lockstep.batch_size.estimate import MARGIN, estimate, peak_bytes
from lockstep.config.compose import compose, plain
from lockstep.runs.errors import UserError
from runs import run_door

MIB = 2**20


def peak_mib(batch, *words, ranks=1, devices=1):
    config = plain(compose("train", ["data=synthetic", "trainer.precision=bf16-mixed", *words]))
    return MARGIN * peak_bytes(config, batch, ranks, devices) / MIB


VIT = ("model=vit", "data.image_size=224")
RESNET = ("model=timm", "model.name=resnet18", "data.image_size=96", "trainer=ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "words", "ranks", "reserved_mib"),
    [(128, RESNET, 2, 534), (736, (*VIT, "trainer=ddp"), 4, 14510), (910, (*VIT, "trainer=fsdp"), 4, 14612)],
)
def test_an_estimate_is_within_ten_percent_of_the_allocator(batch, words, ranks, reserved_mib):
    assert peak_mib(batch, *words, ranks=ranks, devices=ranks) == pytest.approx(reserved_mib, rel=0.1)


@pytest.mark.slow
def test_more_ranks_hold_less_each_under_fsdp_unless_they_shard_within_a_node():
    def fsdp(ranks, *words):
        return peak_mib(8, "model=vit_tiny_32", "model.embed_dim=384", "trainer=fsdp", *words, ranks=ranks, devices=2)

    assert fsdp(2) > 1.2 * fsdp(8) and fsdp(8, "trainer.shard_within_node=true") == pytest.approx(fsdp(2))


@pytest.mark.slow
def test_recomputed_activations_take_less_and_an_average_of_the_weights_more():
    words = ("model=vit_tiny_32", "trainer=gpu")
    assert peak_mib(256, *words, "trainer.activation_checkpointing=true") < 0.6 * peak_mib(256, *words)
    assert peak_mib(8, *words, "trainer.ema_decay=0.9") > peak_mib(8, *words)


@pytest.mark.slow
def test_the_command_prints_the_largest_batch_of_all_ranks(tmp_path):
    words = ["model=small_cnn", "data=digits", "trainer=ddp", "trainer.devices=4", "trainer.num_nodes=2"]
    done = run_door("find_batch_size", "--estimate", *words, "trainer.memory_limit_gib=0.01", logs=tmp_path)
    assert done.code == 0 and " × 8 × 1 · " in done.output and "nothing was run" in done.output, done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer=ddp"], "pass trainer.memory_limit_gib=16"),
        (["trainer=dp", "trainer.memory_limit_gib=16"], "use trainer=gpu, ddp, fsdp or allreduce"),
    ],
)
def test_what_it_cannot_estimate_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        estimate(compose("train", ["model=small_cnn", "data=synthetic", *words]))

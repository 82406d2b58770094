"""Which overrides of the user a run of a proof takes."""

import pytest

from lockstep.config.compose import CONFIGS
from lockstep.runs.proof import _keeps_override


@pytest.mark.parametrize(
    ("key", "trainer", "is_kept"),
    [
        ("optimizer.lr", "cpu", True),
        ("trainer.gradient_clip_val", "cpu", True),
        ("trainer.devices", "ddp_sim", False),
        ("trainer.gradient_dtype", "ddp_sim", True),
        ("trainer.gradient_dtype", "cpu", False),
        ("trainer.gradient_dtype", "fsdp_sim", False),
        ("trainer.reshard_after_forward", "fsdp_sim", True),
        ("trainer.reshard_after_forward", "ddp_sim", False),
        ("trainer.detect_anomaly", "cpu", True),
    ],
)
def test_an_override_is_kept_where_its_trainer_has_the_key(key, trainer, is_kept):
    assert _keeps_override(key, trainer, (CONFIGS,)) is is_kept

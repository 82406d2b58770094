"""A bare training without a GPU says what it would take; whoever chose what to train, or on what, trains."""

import pytest

from lockstep.config.compose import compose, plain
from lockstep.launch.without_gpu import refuse_days_on_cpu
from lockstep.runs.errors import UserError


def refused(*words, accelerator="cpu"):
    try:
        refuse_days_on_cpu({**plain(compose("train", list(words))), "overrides": list(words)}, accelerator)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("words", [[], ["seed=3"], ["trainer.max_epochs=1"], ["ckpt_path=r"]])
def test_nothing_that_makes_it_small(words):
    said = refused(*words)
    assert "vit_base_patch32_224 on cifar10 at 224 pixels" in said and "make train (experiment=quickstart)" in said
    assert refused(*words, accelerator="gpu") is None


@pytest.mark.parametrize(
    "word",
    ["trainer=cpu", "trainer=ddp_sim", "experiment=vit_ddp", "model=small_cnn", "data=digits", "debug=fast_dev_run",
     "resume=r", "trainer.max_steps=2", "trainer.accelerator=cpu"],
)  # fmt: skip
def test_somebody_chose(word):
    assert refused(word) is None

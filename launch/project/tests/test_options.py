"""Every option in configs/ composes: a new yaml is tested by being there."""

import pytest

from lockstep.config.compose import CONFIGS, compose

GROUPS = (
    "augmentation",
    "callbacks",
    "data",
    "experiment",
    "loss",
    "metrics",
    "model",
    "optimizer",
    "scheduler",
    "trainer",
)
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]


@pytest.mark.parametrize("option", OPTIONS)
def test_it_composes(option):
    assert compose("train", [option]).seed == 42

"""What is composed from a command line, and the sentence where that cannot be."""

import pytest

from lockstep.config.compose import compose
from lockstep.runs.errors import UserError


@pytest.mark.parametrize("word", ["+=adadelta", "=3", "++=x", "~", "", " = 1"])
def test_an_override_without_a_key_is_named(word):
    with pytest.raises(UserError, match="names no key: write key=value"):
        compose("train", [word])


def test_an_override_counts():
    assert compose("train", ["optimizer.lr=0.5"]).optimizer.lr == 0.5

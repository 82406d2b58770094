"""Another user of the machine beside a run: whatever he says to its ports, no code of his runs in it."""

import pytest

import stranger
from hosts import needs_hosts
from stranger_campaign import beside_one_machine, beside_two_hosts

pytestmark = [needs_hosts, pytest.mark.slow]


@pytest.mark.parametrize("kind", stranger.KINDS)
def test_beside_two_ranks_of_one_machine(tmp_path, kind):
    seen = beside_one_machine(tmp_path, 1, [kind])
    assert seen.wrong == [] and seen.tries[kind] >= 1, seen


def test_beside_two_hosts(tmp_path):
    seen = beside_two_hosts(tmp_path, 1, list(stranger.KINDS))
    assert seen.wrong == [] and seen.tries.total() >= 5, seen

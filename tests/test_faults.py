"""What two hosts do when something breaks: who is named, how long it takes, what is left."""

import pytest

from host_faults import FAULTS, faults_of
from hosts import needs_hosts, two_hosts

pytestmark = [needs_hosts, pytest.mark.slow]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault, hosts):
    seen = fault(hosts)
    assert faults_of(seen, FAULTS[fault]) == [], seen

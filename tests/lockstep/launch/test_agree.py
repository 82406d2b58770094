"""Which run a process is of, before any folder is made."""

import pytest

from lockstep.distributed.cluster import Cluster
from lockstep.launch import agree
from lockstep.launch.agree import agree_on_run
from lockstep.runs.errors import UserError

ALONE = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
NODE = Cluster("nodes", 2, 1, 1, None, "10.0.0.1", 29500)
RANK = Cluster("torchrun", 1, 2, 0, 1, "127.0.0.1", 29500)


def config(**own):
    return {"run_id": None, "resume": None, "trainer": {"timeout_s": 5}, **own}


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """What other nodes and ranks would say; a list of what they were asked."""
    asked = []

    def meet(config, cluster, accelerator, run_id):
        asked.append(run_id)
        return "of-node-0"

    def agreed_run_id(cluster, mine, timeout_s):
        asked.append(mine)
        return "of-rank-0"

    monkeypatch.setattr(agree, "meet", meet)
    monkeypatch.setattr(agree, "agent_run_id", lambda environ: "mine")
    monkeypatch.setattr("lockstep.distributed.process_group.agreed_run_id", agreed_run_id)
    return asked


@pytest.mark.parametrize(
    ("own", "environ", "cluster", "run_id", "asks"),
    [
        ({}, {}, ALONE, None, []),
        ({"run_id": "r"}, {"RUN_ID": "other"}, ALONE, "r", []),
        ({}, {"RUN_ID": "other"}, ALONE, "other", []),
        ({}, {}, NODE, "of-node-0", [None]),
        ({"run_id": "r", "resume": "auto"}, {}, NODE, "of-node-0", ["r"]),
        ({"resume": "old"}, {}, NODE, None, ["old"]),
        ({}, {}, RANK, "of-rank-0", ["mine"]),
        ({"run_id": "r"}, {}, RANK, "r", []),
        ({"resume": "old"}, {}, RANK, None, []),
    ],
)
def test_the_run_id_of_all_processes(own, environ, cluster, run_id, asks, others):
    assert agree_on_run(config(**own), cluster, "cpu", environ) == run_id
    assert others == asks


def test_resume_auto_needs_a_name():
    with pytest.raises(UserError, match="give run_id=… .or RUN_ID., or resume=<run_id>"):
        agree_on_run(config(resume="auto"), ALONE, "cpu", {})

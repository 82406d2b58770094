"""Another user of the machine beside a run: whatever he says to its ports, no code of his runs in it."""

import os
from functools import partial

import pytest

import stranger
from hosts import needs_hosts
from runs import run_door

pytestmark = needs_hosts

SMALL = ["data=synthetic", "data.num_images=400", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer.num_threads=1", "trainer.max_epochs=20", "trainer.timeout_s=15", "test=false"]  # fmt: skip


@pytest.fixture
def canaries(tmp_path):
    """A folder that the stranger can write too, which shows that his pickles work."""
    folder = tmp_path / "canaries"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def caught(canaries):
    """Files that a process of the run's user has left."""
    return [path.name for path in canaries.iterdir() if path.stat().st_uid == os.geteuid()]


def ended_as_it_may(code, output):
    """Finished, or by one sentence of its own."""
    return code == 0 or output.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [[name] for name in stranger.KINDS], ids=lambda kinds: kinds[0])
def test_beside_the_ranks_of_one_machine(tmp_path, canaries, kinds):
    report = tmp_path / "report.txt"
    done = run_door("train", *SMALL, "trainer=ddp_sim", logs=tmp_path / "logs",
                    before=partial(stranger.invite, str(report), str(canaries), 1, kinds))  # fmt: skip
    assert caught(canaries) == [] and stranger.tries(report.read_text()) >= 1
    assert ended_as_it_may(done.code, done.output), done.output

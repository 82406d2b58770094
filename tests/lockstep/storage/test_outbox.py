"""What waits on disk for its upload, and what a start notes for whoever finishes it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

from lockstep.storage.checkpoint_files import Sidecar
from lockstep.storage.outbox import Notes, Outbox


def test_ranks_that_note_at_once_lose_nothing(tmp_path):
    """Each with an Outbox of its own, as ranks that share a run folder."""
    outboxes = [Outbox(tmp_path, rank) for rank in range(4)]

    def work(rank: int) -> None:
        for number in range(50):
            outboxes[rank].note(**{f"{rank}-{number}": number})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(json.loads((tmp_path / "start.json").read_text())) == 200


def test_notes_are_kept_one_by_one(tmp_path):
    outbox = Outbox(tmp_path)
    assert outbox.notes() == Notes(None, None, None)
    outbox.note(generation=3, deadline=12.5)
    outbox.note(flush_left_s=60.0, deadline=None)
    assert outbox.notes() == Notes(3, 60.0, None)
    (tmp_path / "start.json").write_text('["torn"]')
    assert outbox.notes() == Notes()


def test_a_checkpoint_waits_under_a_second_name_until_it_is_dropped(tmp_path):
    path = tmp_path / "best-step00000010.ckpt"
    path.write_bytes(b"weights")
    outbox = Outbox(tmp_path / "upload")
    item = outbox.add("best", path, Sidecar(10, 7, "ab" * 32, metric={"val/acc": 0.5}), generation=2)
    assert os.path.samefile(item.path, path) and outbox.ranks() == [0]
    path.unlink()
    [left] = Outbox(tmp_path / "upload").left()
    assert (left.kind, left.step, left.generation, left.adopted) == ("best", 10, 2, True)
    assert left.sidecar == item.sidecar and left.path.read_bytes() == b"weights"
    outbox.drop(left)
    assert outbox.left() == [] and outbox.ranks() == []


def test_what_an_older_version_left_is_taken_up(tmp_path):
    """As commit 1658469 wrote it."""
    entry = tmp_path / "rank00000-best-step00000020"
    entry.mkdir()
    (entry / "best-step00000020.ckpt").write_bytes(b"weights")
    sidecar = {"bytes": 7, "sha256": "ab" * 32, "epoch": 1, "batches_done": 10, "batches_per_epoch": 10,
               "phase": "validation", "step": 20, "world_size": 1, "metric": {"val/acc": 0.5}}  # fmt: skip
    held = {"kind": "best", "name": "best-step00000020.ckpt", "sidecar": sidecar, "generation": 3}
    (entry / "item.json").write_text(json.dumps(held))
    (tmp_path / "start.json").write_text(json.dumps({"deadline": None, "flush_left_s": 300.0, "generation": 3}))
    [item] = Outbox(tmp_path).left()
    assert (item.step, item.generation, item.sidecar.metric) == (20, 3, {"val/acc": 0.5})
    assert item.sidecar.sha256 == "ab" * 32 and Outbox(tmp_path).notes() == Notes(3, 300.0, None)

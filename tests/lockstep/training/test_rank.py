"""Ranks that meet: a store that never answers ends the start in a sentence."""

import json
import time
from pathlib import Path

import pytest

from local_ranks import run_ranks
from lockstep.training.rank import ended_after


def joins(here, seconds, path):
    """What lies in `join` for so many seconds where 0.5 are allowed."""
    with ended_after(0.5, here, lambda error: Path(path).write_text(json.dumps(error))):
        time.sleep(seconds)
    time.sleep(1.0)
    return "met"


def test_a_store_that_does_not_answer_ends_the_rank_with_what_it_waited_for(tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 of 1 died .exit code 1."):
        run_ranks(joins, 1, 60.0, str(tmp_path / "error"))
    error = json.loads((tmp_path / "error").read_text())
    assert error["message"].startswith("the ranks' store at 127.0.0.1:") and error["kind"] == "silence"


def test_ranks_that_meet_in_time_are_left_alone(tmp_path):
    assert run_ranks(joins, 1, 0.1, str(tmp_path / "error")) == ["met"] and not (tmp_path / "error").exists()

"""The last line of a rank that failed."""

import errno
import re

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._inductor.exc import InductorError
from torch.distributed import HashStore

from local_ranks import local_cluster
from lockstep.ranks import failures
from lockstep.ranks.failures import (
    describe_error,
    describe_unequal_epochs,
    explain_failure,
    log_failure,
)


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        (torch.OutOfMemoryError, "trainer.accumulate_grad_batches=2"),
        (BackendCompilerFailed, "trainer.compile=false"),
        (InternalTorchDynamoError, "trainer.compile=false"),
        (InductorError, "trainer.compile=false"),
    ],
)
def test_out_of_memory_and_failed_compilation_say_what_helps(kind, mend, capsys):
    log_failure(describe_error(1, kind.__new__(kind, "no"), host="node-b", phase="training"), "")
    place, hint = capsys.readouterr().err.splitlines()
    assert f"rank 1 on node-b, in training: {kind.__name__}" in place and mend in hint


@pytest.mark.parametrize(
    ("text", "rank", "kind"),
    [
        ("DataLoader timed out after 30 seconds", 0, "RuntimeError"),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300000ms", 1, "hangs"),
    ],
)
def test_only_a_network_error_blames_a_silent_rank(text, rank, kind, monkeypatch):
    monkeypatch.setattr(failures, "PEER_TIMEOUT_S", 0.1)
    cluster = local_cluster(0, 2, 0)
    error = explain_failure(RuntimeError(text), HashStore(), cluster, ["node-a", "node-b"])
    assert (error.culprit["rank"], error.culprit["kind"]) == (rank, kind)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [[[0, 11, 0]], [[0, 10, 1]]],
            "Rank 1 has had 10 training batches in epoch 1, rank 0 at least 11",
        ),
        ([[[0, 12, 1]], [[0, 10, 1], [1, 3, 0]]], "Rank 1 has had 10 .* rank 0 12"),
        ([[[0, 10, 1], [1, 3, 0]], [[0, 12, 1]]], "Rank 0 has had 10 .* rank 1 12"),
        ([[[0, 10, 1]], [[0, 10, 1], [1, 1, 0]]], None),
        ([[[0, 9, 0]], [[0, 10, 1]]], None),
        ([[], []], None),
        ([], None),
    ],
)
def test_ranks_with_unequal_batches_are_told_apart(ranks, said):
    sentence = describe_unequal_epochs(ranks)
    assert re.match(said, sentence) if said else sentence == ""


def test_an_error_file_that_finds_no_room_is_removed(tmp_path, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def full(self, error):
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ErrorHandler, "record_exception", full)
    failures._tell_agent(OSError(), describe_error(0, OSError("no room on /x")))
    assert not file.exists() and "no room on /x" in capsys.readouterr().err

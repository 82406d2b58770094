"""The last line of a rank that failed."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._inductor.exc import InductorError

from lockstep.launch.failures import log_failure, rank_error


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        (torch.OutOfMemoryError, "trainer.accumulate_grad_batches=2"),
        (BackendCompilerFailed, "trainer.compile=false"),
        (InternalTorchDynamoError, "trainer.compile=false"),
        (InductorError, "trainer.compile=false"),
    ],
)
def test_out_of_memory_and_a_failed_compilation_are_told_with_what_helps(kind, mend, capsys):
    log_failure(rank_error(1, kind.__new__(kind, "no"), host="node-b", phase="training"), "")
    place, hint = capsys.readouterr().err.splitlines()
    assert f"rank 1 on node-b, in training: {kind.__name__}" in place and mend in hint

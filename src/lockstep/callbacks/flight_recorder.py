"""NCCL's last collectives, which torch's flight recorder keeps (`_dump_nccl_trace`), as a file of each rank.

torch writes the same file where a collective times out, but our watch ends a rank before that.
`torchfrtrace RUN_FOLDER --prefix nccl-trace-rank` shows the first collective that not all ranks came to.
"""

import logging

import torch.distributed as dist

from lockstep.runs.folder import RunFolder

log = logging.getLogger(__name__)


def dump(folder: RunFolder, rank: int) -> None:
    """Of this rank; nothing where no GPUs take part."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return
    try:
        from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

        folder.nccl_trace(rank).write_bytes(_dump_nccl_trace())
    except (ImportError, RuntimeError, OSError) as error:  # what ended the run is said in any case
        log.debug(f"no trace of NCCL's collectives: {error}")

"""What ckpt_path= names, in every door: a file or folder of shards, a run id (its best checkpoint), or s3://…."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_files import complete
from errors import UserError
from run_files import RUN_ID_PATTERN, find_run


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """Its absolute path on this machine.

    Args:
        logs: where runs lie.
        s3: the config group (endpoint_url and so on); its uri is not used.
        cache: where what s3:// names is put.
    Raises:
        UserError: it is not there, cannot be reached, or is not what was uploaded.
    """
    if address.startswith("s3:"):
        from storage import resolve_checkpoint

        return resolve_checkpoint(address, s3, cache).resolve()
    path = Path(address)
    if path.exists():
        return path.resolve()
    if not RUN_ID_PATTERN.fullmatch(address) or path.suffix == ".ckpt":
        raise UserError(f"There is no checkpoint {address}.")
    folder = find_run(logs, address)
    best = next((found for found, _ in complete(folder.checkpoints, "best")), None)
    if best is None:
        raise UserError(f"The run {address} has no complete best checkpoint.")
    return best.resolve()

"""Send what a run has not yet uploaded: its best checkpoint, the last one, its record and curves.

python src/upload.py RUN_ID [s3.uri=s3://bucket/prefix] [s3.endpoint_url=https://…] [paths.log_dir=logs]
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import logging
import sys
from pathlib import Path

from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK, UserError
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, read_config
from lockstep.runs.output import set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_record, status_of
from lockstep.runs.script import exit_code_of
from lockstep.storage.bucket import open_store
from lockstep.storage.finish import upload_left
from lockstep.storage.object_store import ObjectStore

log = logging.getLogger(__name__)

TIMEOUT_S = 3600.0


def upload(argv: list[str]) -> int:
    """
    Raises:
        UserError: an unknown run or option, a run that is still training, a bucket that is no bucket.
    """
    run_ids = [word for word in argv if "=" not in word]
    overrides = dict(word.split("=", 1) for word in argv if "=" in word)
    if len(run_ids) != 1:
        raise UserError("Name one run: python src/upload.py RUN_ID.")
    logs = Path(overrides.pop("paths.log_dir", REPOSITORY / "logs"))
    other_node = RunFolder(logs / "train" / "runs" / checked_run_id(run_ids[0]))  # it has no record, only its shards
    has_shards = not other_node.record.exists() and (other_node.path / "upload").is_dir()
    folder = other_node if has_shards else find_run(logs, run_ids[0])
    store = _store(folder, overrides)
    if folder.record.exists() and status_of(read_record(folder.record)) == "running":
        raise UserError(f"The run {folder.run_id} is still training: it uploads by itself.")
    error = upload_left(store, folder, TIMEOUT_S)
    log.info(
        f"not uploaded: {error}." if error else f"{folder.run_id} is in {store.root}{store.prefix}".rstrip("/") + "."
    )
    return EXIT_NOT_UPLOADED if error else EXIT_OK


def _store(folder: RunFolder, overrides: dict[str, str]) -> ObjectStore:
    """Of the s3 options that the run's user gave it, with what the command line says."""
    path = folder.any_config()
    settings = dict((read_config(path) if path else {}).get("s3") or {})
    for name, value in overrides.items():
        group, _, key = name.partition(".")
        if group != "s3" or key not in ("uri", "endpoint_url"):
            raise UserError(f"{name!r} is no option of upload.py: there are s3.uri, s3.endpoint_url and paths.log_dir.")
        settings[key] = value
    if not settings.get("uri"):
        raise UserError(f"The run {folder.run_id} was trained without s3.uri: give s3.uri=s3://bucket/prefix.")
    return open_store(settings)


def main(argv: list[str]) -> int:
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return EXIT_OK
    return exit_code_of(lambda: upload(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Send what a run has not yet uploaded: its best checkpoint, the last one, its record and curves.

python src/upload.py RUN_ID [s3.uri=s3://bucket/prefix] [s3.endpoint_url=https://…] [paths.log_dir=logs]
"""

import logging
import sys
from pathlib import Path

from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.runs.folder import find_run, read_config
from lockstep.runs.output import set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_record, status_of
from lockstep.runs.script import exit_code_of
from lockstep.storage.uploader import finish_upload

log = logging.getLogger(__name__)

TIMEOUT_S = 3600.0


def upload(argv: list[str]) -> int:
    """
    Raises:
        UserError: an unknown run or option, a run that is still training, a bucket that is no bucket.
    """
    run_ids = [word for word in argv if "=" not in word]
    given = dict(word.split("=", 1) for word in argv if "=" in word)
    if unknown := sorted(given.keys() - {"s3.uri", "s3.endpoint_url", "paths.log_dir"}):
        raise UserError(f"{unknown[0]!r} is no option of upload.py: there are s3.uri, s3.endpoint_url, paths.log_dir.")
    if len(run_ids) != 1:
        raise UserError("Name one run: python src/upload.py RUN_ID.")
    folder = find_run(Path(given.pop("paths.log_dir", REPOSITORY / "logs")), run_ids[0])
    before = (read_config(folder.config).get("s3") or {}) if folder.config.exists() else {}
    s3 = {**before, **{key.removeprefix("s3."): value for key, value in given.items()}}
    if not s3.get("uri"):
        raise UserError(f"The run {folder.run_id} was trained without s3.uri: give s3.uri=s3://bucket/prefix.")
    if status_of(read_record(folder.record)) == "running":
        raise UserError(f"The run {folder.run_id} is still training: it uploads by itself.")
    code = finish_upload({**s3, "flush_timeout_s": TIMEOUT_S}, folder, EXIT_OK)
    error = read_record(folder.record).upload.error
    log.info(f"{folder.run_id} is in {s3['uri']}." if code == EXIT_OK else f"not uploaded: {error}.")
    return code


def main(argv: list[str]) -> int:
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return EXIT_OK
    return exit_code_of(lambda: upload(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

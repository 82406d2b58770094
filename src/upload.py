"""Upload the rest of a finished run: its best and last checkpoint, its record and curves.

python src/upload.py RUN_ID [s3.uri=s3://bucket/prefix] [s3.endpoint_url=https://…]
    [paths.log_dir=logs]
"""

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.process.errors import EXIT_NOT_UPLOADED, EXIT_OK, UserError
from lockstep.process.project import REPOSITORY
from lockstep.process.script import run_with_options
from lockstep.records.folder import RunFolder, find_run_folder, read_config
from lockstep.records.record import read_record, status_of
from lockstep.storage.errors import S3Error
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import finish_upload, send_files

log = logging.getLogger(__name__)

# In place of an option that the command line leaves to the run.
VALUE_OF_RUN = "that of the run"
OPTIONS = {
    "run": None,
    "s3.uri": VALUE_OF_RUN,
    "s3.endpoint_url": VALUE_OF_RUN,
    "paths.log_dir": str(REPOSITORY / "logs"),
}
# There is no training to hold up, so the upload may take long.
FLUSH_TIMEOUT_S = 3600.0
# Codes of S3Error.
LASTING_FAULTS = (
    "NoSuchBucket",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "NoCredentialsError",
    "ProfileNotFound",
    "PermanentRedirect",
)


def upload(options: dict[str, str]) -> int:
    """Upload the rest; return EXIT_NOT_UPLOADED if something is still missing there."""
    folder = find_run_folder(Path(options["paths.log_dir"]), options["run"])
    s3 = _bucket_config(folder, options)
    if not s3.get("uri"):
        raise UserError(
            f"The run {folder.run_id} was trained without s3.uri. Pass s3.uri=s3://bucket/prefix."
        )
    if status_of(read_record(folder.record_path)) == "running":
        raise UserError(f"The run {folder.run_id} is still training: it uploads by itself.")

    _refuse_unusable_bucket(Bucket.from_config(s3).joinpath(folder.run_id))
    s3["flush_timeout_s"] = FLUSH_TIMEOUT_S
    code = finish_upload(s3, folder, EXIT_OK)
    if code != EXIT_OK:
        reason = read_record(folder.record_path).upload.error or "the time was up"
        log.error(f"The checkpoints of {folder.run_id} are not all in {s3['uri']}: {reason}.")
        return code
    if not send_files(s3, folder):
        log.error(f"The record and the page of {folder.run_id} are not in {s3['uri']}.")
        return EXIT_NOT_UPLOADED
    log.info(f"{folder.run_id} is in {s3['uri']}.")
    return EXIT_OK


def _refuse_unusable_bucket(bucket: Bucket) -> None:
    """Raise UserError for a fault that waiting does not mend. Others are tried again."""
    try:
        bucket.check_writable()
    except S3Error as error:
        if error.code in LASTING_FAULTS:
            raise UserError(f"{bucket.uri} cannot be used: {error}.") from None


def _bucket_config(folder: RunFolder, options: dict[str, str]) -> dict[str, Any]:
    """Return the run's bucket, with what the command line names in its place."""
    s3: dict[str, Any] = {}
    if folder.config_path.exists():
        s3 = dict(read_config(folder.config_path).get("s3") or {})
    for key in ("uri", "endpoint_url"):
        if options[f"s3.{key}"] != VALUE_OF_RUN:
            # An empty endpoint is Amazon's.
            s3[key] = options[f"s3.{key}"] or None
    return s3


def main(argv: list[str]) -> int:
    ids = [word for word in argv if "=" not in word and not word.startswith("-")]
    options = [word for word in argv if word not in ids]
    if ids:
        options.append(f"run={' '.join(ids)}")
    return run_with_options(options, __doc__ or "", OPTIONS, upload)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

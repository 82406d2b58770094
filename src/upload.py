"""Upload the rest of a finished run: its best and last checkpoint, its record and curves.

python src/upload.py RUN_ID [s3.uri=s3://bucket/prefix] [s3.endpoint_url=https://…] [paths.log_dir=logs]
"""

import logging
import sys
from pathlib import Path

from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.runs.folder import find_run, read_config
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_record, status_of
from lockstep.runs.script import run_with_options
from lockstep.storage.uploader import finish_upload, send_files

OPTIONS = {"run": None, "s3.uri": "", "s3.endpoint_url": "", "paths.log_dir": str(REPOSITORY / "logs")}


def upload(given: dict[str, str]) -> int:
    """Upload the rest; return EXIT_NOT_UPLOADED if the best checkpoint is still not in the bucket."""
    folder = find_run(Path(given["paths.log_dir"]), given["run"])
    s3 = (read_config(folder.config).get("s3") or {}) if folder.config.exists() else {}
    s3 |= {key: given[f"s3.{key}"] for key in ("uri", "endpoint_url") if given[f"s3.{key}"]}
    if not s3.get("uri"):
        raise UserError(f"The run {folder.run_id} was trained without s3.uri. Pass s3.uri=s3://bucket/prefix.")
    if status_of(read_record(folder.record)) == "running":
        raise UserError(f"The run {folder.run_id} is still training: it uploads by itself.")
    s3["flush_timeout_s"] = 3600.0
    code = finish_upload(s3, folder, EXIT_OK)
    if code == EXIT_OK:
        send_files(s3, folder)
    sent = f"{folder.run_id} is in {s3['uri']}." if code == EXIT_OK else "not uploaded: "
    logging.getLogger(__name__).info(sent + (read_record(folder.record).upload.error or ""))
    return code


def main(argv: list[str]) -> int:
    ids = [word for word in argv if "=" not in word and not word.startswith("-")]
    words = [word for word in argv if word not in ids] + ([f"run={' '.join(ids)}"] if ids else [])
    return run_with_options(words, __doc__ or "", OPTIONS, upload)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

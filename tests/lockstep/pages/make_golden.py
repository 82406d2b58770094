"""Writes golden/ anew after a change of the pages that is meant: run this file, then git diff."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "src"), str(HERE.parents[1] / "harness")]


def main() -> None:
    from conftest import NOW, build_three

    from lockstep.pages.html_report import report_data
    from lockstep.pages.page_set import load_entries

    golden = HERE / "golden"
    shutil.rmtree(golden, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        logbook = build_three(Path(scratch))
        shutil.copytree(logbook, golden)
        entries = load_entries(logbook, NOW)
        data = report_data(entries, [entry.title for entry in entries])
        (golden / "report-data.json").write_text(json.dumps(data, indent=None) + "\n")


if __name__ == "__main__":
    main()

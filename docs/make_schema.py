"""Write docs/run.schema.json, the JSON schema of run.json.    python docs/make_schema.py   (or: make docs)"""

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.runs.record import SCHEMA_VERSION, RunRecord  # noqa: E402
from lockstep.runs.typed_json import json_schema  # noqa: E402


def schema_text() -> str:
    schema = json_schema(RunRecord, f"The run record (run.json), schema version {SCHEMA_VERSION}")
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    (REPOSITORY / "docs" / "run.schema.json").write_text(schema_text())

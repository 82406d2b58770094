"""Faults done to a run on two hosts, with what was seen and the seconds until no process was left.

    python benchmarks/faults.py             as root: network namespaces, see tests/harness/hosts.py

Writes benchmarks/results/faults.json and benchmarks/faults.md.
"""

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests/harness")]

from host_faults import FAULTS, TIMEOUT_S, faults_of  # noqa: E402
from hosts import missing, two_hosts  # noqa: E402
from provenance import code_state  # noqa: E402

HEAD = f"""# Faults on two hosts

Two hosts in network namespaces of one machine (2 cores), each with its own copy of the code, one rank each, started
with one command per node and `trainer.timeout_s={TIMEOUT_S}`. Seconds from the fault until no process of the run was
left on either host; both hosts' last line; exit codes of node 0 and node 1. Written by `python benchmarks/faults.py`,
which ends with an error where a run hangs beyond its limit, names the wrong rank, loses its checkpoints or leaves a
process behind.

| fault | done | seconds (limit) | exit codes | run.json | last line on node 0 | last line on node 1 |
|---|---|---|---|---|---|---|
"""


def line(row: dict) -> str:
    error = row["error"] or {}
    record = f"{row['status'] or 'none'}" + (f", rank {error['rank']} on {error['host']}" if error else "")
    codes = ", ".join(str(code) for code in row["codes"])
    last = [text.replace("|", "\\|") or "–" for text in row["last_lines"]]
    seconds = f"{row['seconds']} ({row['limit_s']})"
    return f"| {row['fault']} | {row['done']} | {seconds} | {codes} | {record} | {last[0]} | {last[1]} |\n"


def main(chosen: list[str]) -> int:
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        for fault, wanted in FAULTS.items():
            if chosen and fault.__name__ not in chosen:
                continue
            seen = fault(hosts)
            wrong = faults_of(seen, wanted)
            bad += bool(wrong)
            rows.append({**seen.row(), "wrong": wrong})
            print(f"{fault.__name__}: {seen.seconds} s {wrong or 'as it must be'}", flush=True)
    if not chosen:
        found = {"code": code_state(HERE.parent)["commit"], "timeout_s": TIMEOUT_S, "faults": rows}
        (HERE / "results/faults.json").write_text(json.dumps(found, indent=1) + "\n")
        (HERE / "faults.md").write_text(HEAD + "".join(map(line, rows)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

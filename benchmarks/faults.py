"""The campaign of faults: what was done to runs, how often, what was seen, and in how many seconds.

    python benchmarks/faults.py                              every piece at its full count
    python benchmarks/faults.py kills --seed 2 --count 60    one piece: make soak PIECE=kills SEED=2 COUNT=60
    python benchmarks/faults.py --list

Each piece replaces its rows in benchmarks/results/faults.json; benchmarks/faults.md is written from that file. Exit
code 1 where something was not as it must be. Two hosts are network namespaces (root, see tests/harness/hosts.py).
"""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests/harness")]
RESULTS, PAGE = HERE / "results/faults.json", HERE / "faults.md"

from campaign import PIECES, task  # noqa: E402
from host_faults import FAULTS, TIMEOUT_S, faults_of  # noqa: E402

from hosts import missing, two_hosts  # noqa: E402
from lockstep.runs.provenance import code_state  # noqa: E402

for module in (
    "kills",
    "signals",
    "host_campaign",
    "spot",
    "store_campaign",
    "disk_campaign",
    "long_run",
    "fuzz",
    "damage",
    "tested",
    "slurm_campaign",
    "poisoner",
    "world_sizes",
):
    importlib.import_module(module)

HEAD = """# Under fire

What was done to runs, how often, what was seen, in how many seconds; on a machine of two cores that other work shared.
`make soak` does all of it, `make soak PIECE=kills SEED=1 COUNT=60` one piece; each replaces its rows here and fails
where something is not as it must be. Written by `python benchmarks/faults.py`.

"""
HOSTS = f"""
## Two hosts

Two hosts in network namespaces of one machine (2 cores), each with its own copy of the code, one rank each, started
with one command per node and `trainer.timeout_s={TIMEOUT_S}`. Seconds from the fault until no process of the run was
left on either host; both hosts' last line; exit codes of node 0 and node 1. The piece `hosts` fails where a run hangs
beyond its limit, names the wrong rank, loses its checkpoints or leaves a process behind.

| fault | done | seconds (limit) | exit codes | run.json | last line on node 0 | last line on node 1 |
|---|---|---|---|---|---|---|
"""


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|") or "–"


def host_line(row: dict[str, Any]) -> str:
    error = row["error"] or {}
    record = f"{row['status'] or 'none'}" + (f", rank {error['rank']} on {error['host']}" if error else "")
    codes = ", ".join(str(code) for code in row["codes"])
    last = [cell(text) for text in row["last_lines"]]
    seconds = f"{row['seconds']} ({row['limit_s']})"
    return f"| {row['fault']} | {row['done']} | {seconds} | {codes} | {record} | {last[0]} | {last[1]} |\n"


TABLE = "| piece | what was done | times | seed | what was seen | wrong | seconds |\n|---|---|---:|---:|---|---|---:|\n"


def page(found: dict[str, Any]) -> str:
    """faults.md from faults.json."""
    text = HEAD + TABLE
    for name in sorted(PIECES):  # not as they were imported: a test imports some of them first
        entry = found["campaign"].get(name, {"rows": []})
        for row in entry["rows"]:
            wrong = cell("; ".join(row["wrong"])) if row["wrong"] else "nothing"
            cells = [
                name,
                cell(row["done"]),
                row["times"],
                entry["seed"],
                cell(row["seen"]),
                wrong,
                f"{row['seconds']:g}",
            ]
            text += "| " + " | ".join(map(str, cells)) + " |\n"
    open_ = [f"{name} ({piece.count})" for name, piece in sorted(PIECES.items()) if not complete(found, name)]
    if open_:
        text += f"\nNot run yet, or not at the full count (in brackets): {', '.join(open_)}.\n"
    return text + HOSTS + "".join(map(host_line, found["faults"]))


def complete(found: dict[str, Any], name: str) -> bool:
    """Whether a piece has been run at its full count, not only for some minutes."""
    entry = found["campaign"].get(name, {"count": 0, "rows": []})
    done = sum(row["times"] for row in entry["rows"])
    return entry.get("complete", min(entry["count"], done) >= PIECES[name].count)


def keep(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(found))


def two_host_faults(chosen: list[str]) -> tuple[list[dict[str, Any]], int]:
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
    return rows, bad


def run_piece(name: str, seed: int, count: int | None, minutes: float, record: bool = True) -> int:
    """Do one piece and write it down if it is to be; returns how many rows are not as they must be."""
    found = json.loads(RESULTS.read_text())
    code = code_state(HERE.parent)["commit"]
    if name == "hosts":
        if reason := missing():
            print(f"hosts: left out, {reason}")
            return 0
        rows, bad = two_host_faults([])
        if record:
            keep({**found, "code": code, "timeout_s": TIMEOUT_S, "faults": rows})
        return bad
    piece = PIECES[name]
    if reason := piece.missing():
        print(f"{name}: left out, {reason}")
        return 0
    count = piece.count if count is None else count
    print(f"{name}: {count} times, seed {seed}", flush=True)
    with task(name, seed, count, minutes) as given:
        rows = piece.work(given)
    for row in rows:
        print(f"{name}: {row.done}: {row.times} times, {row.seconds} s; {row.seen}; {row.wrong or 'as it must be'}")
    if record:
        entry = {"code": code, "seed": seed, "count": count, "rows": [row.as_json() for row in rows]}
        entry["complete"] = count >= piece.count and not given.over()
        found = json.loads(RESULTS.read_text())  # another piece may have been written meanwhile
        keep({**found, "campaign": {**found.get("campaign", {}), name: entry}})
    return sum(bool(row.wrong) for row in rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces", nargs="*", metavar="PIECE", choices=[*PIECES, "hosts", []])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each piece, at most about")
    parser.add_argument("--no-record", action="store_true", help="leave the results and their page as they are")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(argv)
    if given.list:
        print("\n".join(f"{name:16} {piece.count}" for name, piece in PIECES.items()), "hosts", sep="\n")
        return 0
    chosen, record = given.pieces or [*PIECES, "hosts"], not given.no_record
    bad = sum(run_piece(name, given.seed, given.count, given.minutes, record) for name in chosen)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

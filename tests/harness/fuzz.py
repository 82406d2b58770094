"""Hypothesis against everything that a user or a stranger may hand in: a UserError or the right answer, never a
traceback, never a hang. `count` is the number of seconds for each target."""

import contextlib
import io
import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from campaign import Clock, Row, Task, piece
from lockstep.runs.errors import UserError

ROUND = 300  # examples between two looks at the clock
SLOW_S = 30.0


def mutated(samples: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of the samples with some bytes changed, cut out, doubled or put in."""
    change = st.tuples(st.floats(0, 1), st.sampled_from("scdi"), st.binary(max_size=8))

    def apply(sample: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
        data = bytearray(sample)
        for place, kind, new in changes:
            at = int(place * len(data))
            if kind == "s":
                data[at : at + len(new)] = new
            elif kind == "c":
                del data[at : at + 1 + len(new) * 16]
            elif kind == "d":
                data[at:at] = data[at : at + 16]
            else:
                data[at:at] = new
        return bytes(data)

    mutant = st.builds(apply, st.sampled_from(samples), st.lists(change, min_size=1, max_size=5))
    return mutant | st.binary(max_size=200)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def overrides() -> tuple[st.SearchStrategy, Callable]:
    from lockstep.config.compose import CONFIGS, compose, plain
    from lockstep.runs.redact import refuse_secrets

    groups = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
    options = sorted({path.stem for path in CONFIGS.glob("*/*.yaml")})
    keys = [
        "optimizer.lr", "data.global_batch_size", "trainer.max_epochs", "trainer", "model", "tags", "callbacks", "seed",
        "data.mean", "s3.uri", "run_id", "test", "hydra.run.dir", "paths.log_dir", "model._target_",
    ]  # fmt: skip
    special = [
        "null", "true", "[]", "{}", "{a:1}", "[1,2", "${paths}", "${oc.env:HOME}", "${x:y}", "1e400", "'", '"', "\\",
        "-1", "???", "a,b", "choice(1,2)", "range(1,3)", "\x00", "ü", "@", "=", "~", "+", "../x",
    ]  # fmt: skip
    key = st.sampled_from([*groups, *keys]) | st.text(max_size=12)
    value = st.sampled_from([*options, *special]) | st.text(max_size=12) | st.integers().map(str)
    signs, ends = st.sampled_from(["", "", "", "+", "++", "~"]), st.sampled_from(["=", "=", ""])
    valid = st.sampled_from([
        "optimizer.lr=0.1", "model=alexnet", "trainer=ddp_sim", "tags=[a,b]", "+data.x=1", "~callbacks.hardware",
        "seed=7", "experiment=quickstart", "data=cifar10", "data.flip=true", "trainer.max_epochs=3",
        "callbacks=[default,spot]",
    ])  # fmt: skip
    word = valid | valid | valid | st.builds("{}{}{}{}".format, signs, key, ends, value)

    def check(words: list[str]) -> None:
        config = plain(compose("train", words))
        refuse_secrets(config)

    return st.lists(word, min_size=1, max_size=4), check


def record_files() -> tuple[st.SearchStrategy, Callable]:
    from example_runs import example_record, write_run
    from lockstep.pages.source import import_run
    from lockstep.runs.folder import read_config
    from lockstep.runs.record import read_record, status_of

    folder = Path(tempfile.mkdtemp(prefix="fuzz-records-"))
    run = write_run(folder, "run-1")
    names = ["run.json", "config.yaml", "metrics.csv", "confusion_matrix.csv", "hardware-node0.csv"]
    whole = {name: (run / name).read_bytes() for name in names if (run / name).exists()}
    fields = st.fixed_dictionaries({}, optional=dict.fromkeys(example_record("x"), ANY))
    replaced = fields.map(lambda changes: json.dumps({**json.loads(whole["run.json"]), **changes}).encode())
    strategy = st.sampled_from(sorted(whole)).flatmap(lambda n: st.tuples(st.just(n), mutated([whole[n]]))) | st.tuples(
        st.just("run.json"), replaced
    )

    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        try:
            (run / name).write_bytes(data)
            with contextlib.suppress(UserError):
                status_of(read_record(run / "run.json"))
            import_run(run)
            read_config(run / "config.yaml")
        finally:
            (run / name).write_bytes(whole[name])

    return strategy, check


def cifar_batches() -> tuple[st.SearchStrategy, Callable]:
    import pickle

    from data.cifar10 import _batch
    from lockstep.data.array_pickle import load_arrays

    content = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [1, 2, 3, 4], b"filenames": [b"a", b"b", b"c", b"d"]}
    samples = [pickle.dumps(content, protocol) for protocol in range(6)]

    def check(data: bytes) -> None:
        _batch(load_arrays(io.BytesIO(data), "data_batch_1"), "data_batch_1")

    return mutated(samples), check


def idx_files() -> tuple[st.SearchStrategy, Callable]:
    import gzip

    from data.mnist import read_idx

    path = Path(tempfile.mkdtemp(prefix="fuzz-idx-"))
    sample = b"\x00\x00\x08\x03" + struct.pack(">III", 3, 4, 4) + bytes(48)

    def check(example: tuple[bytes, bool]) -> None:
        data, zipped = example
        file = path / ("x.gz" if zipped else "x")
        file.write_bytes(data)
        found = read_idx(file)
        assert found.dtype == np.uint8

    plain = st.tuples(mutated([sample]), st.just(False))
    zipped = st.tuples(mutated([gzip.compress(sample)]) | mutated([sample]).map(gzip.compress), st.just(True))
    return plain | zipped, check


def with_other_values(whole: dict[str, Any]) -> st.SearchStrategy[bytes]:
    others = st.dictionaries(st.sampled_from(sorted(whole)), ANY, max_size=3)
    return others.map(lambda changes: json.dumps({**whole, **changes}).encode())


def small_files() -> tuple[st.SearchStrategy, Callable]:
    """What lies beside a checkpoint, in its folder of shards, and in the bucket."""
    from lockstep.storage.checkpoint_files import fault_of, newest_whole, sidecar_path
    from lockstep.storage.object_store import StoreError
    from lockstep.storage.pointer import parse_pointer
    from lockstep.storage.shards import read_manifest
    from lockstep.strategies.sharded_checkpoint import check as check_shards

    folder = Path(tempfile.mkdtemp(prefix="fuzz-small-"))
    checkpoint = folder / "last-step00000010.ckpt"
    checkpoint.write_bytes(b"x" * 10)
    facts = {"bytes": 10, "sha256": "ab" * 32, "step": 10, "epoch": 1, "metric": {}}
    shards = folder / "shards"
    shards.mkdir()
    (shards / "a.safetensors").write_bytes(b"x")
    manifest = {"format": 1, "world_size": 1, "files": {"a.safetensors": {"bytes": 1, "sha256": "ab" * 32}}}
    pointer = {
        "key": "p/r/checkpoints/best-step00000010-g0001-abababab.ckpt", "bytes": 1, "sha256": "ab" * 32, "epoch": 1,
        "step": 10, "metric": {"val/acc": 0.5}, "run_id": "r", "generation": 1, "previous": None,
    }  # fmt: skip
    kinds = {"sidecar": facts, "manifest": manifest, "pointer": pointer}
    samples = {name: json.dumps(whole).encode() for name, whole in kinds.items()}
    changed = {name: with_other_values(whole) for name, whole in kinds.items()}
    strategy = st.sampled_from(sorted(samples)).flatmap(
        lambda name: st.tuples(st.just(name), mutated([samples[name]]) | changed[name])
    )

    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        try:
            if name == "sidecar":
                sidecar_path(checkpoint).write_bytes(data)
                fault_of(checkpoint)
                newest_whole(folder)
            elif name == "manifest":
                (shards / "manifest.json").write_bytes(data)
                read_manifest(data)
                check_shards(shards, hashes=True)
            else:
                parse_pointer(data, "p/r/")
        except StoreError:
            pass  # a sentence, like UserError

    return strategy, check


TARGETS = {
    "Hydra overrides": overrides, "record files": record_files, "CIFAR batches": cifar_batches, "IDX files": idx_files,
    "checkpoints' small files": small_files,
}  # fmt: skip


def run_target(make: Callable, seconds: float, first_seed: int) -> tuple[int, int, float, list[str]]:
    """(examples, of which refused, the slowest in seconds, what is wrong)."""
    strategy, check = make()
    state: dict[str, float] = {"examples": 0, "refused": 0, "slowest": 0.0}
    deadline, number = time.monotonic() + seconds, 0
    wrong: list[str] = []
    while time.monotonic() < deadline and not wrong:

        @seed(first_seed * 1_000_003 + number)
        @settings(max_examples=ROUND, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def one(example: Any) -> None:
            state["examples"] += 1
            began = time.monotonic()
            try:
                check(example)
            except UserError:
                state["refused"] += 1
            took = time.monotonic() - began
            state["slowest"] = max(state["slowest"], took)
            assert took < SLOW_S, f"{took:.0f} s"

        try:
            one()
        except BaseException as error:
            for each in getattr(error, "exceptions", [error]):
                notes = "; ".join(getattr(each, "__notes__", []))
                wrong.append(f"{type(each).__name__}: {str(each)[:300]} {notes[:500]}")
        number += 1
    return int(state["examples"]), int(state["refused"]), state["slowest"], wrong


@piece("fuzz", 600)
def fuzz(task: Task) -> list[Row]:
    rows = []
    for name, make in TARGETS.items():
        clock = Clock()
        examples, refused, slowest, wrong = run_target(make, task.count, task.seed)
        seen = f"{examples} examples, {refused} refused by a sentence, none by a traceback; slowest {slowest:.2f} s"
        rows.append(Row("fuzz", f"{name}, {task.count} s of hypothesis", examples, seen, clock.seconds, wrong))
        task.say(f"{name}: {examples} examples, {wrong or 'fine'}")
    return rows

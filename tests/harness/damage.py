"""Files that a kill, a disk or a stranger has damaged, thousands of them by seed: refused in one sentence or read.

Each kind runs in a process of its own whose memory may grow by 1 GiB, and no file may take 5 seconds. `count` is the
number of checkpoints; of every other kind there are a quarter as many.
"""

import contextlib
import io
import json
import multiprocessing
import os
import pickletools
import random
import resource
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from campaign import Clock, Row, Task, piece

LIMIT_S = 5.0
SILENT_S = 30.0  # the process is gone or stuck where no handler of Python runs
GROWTH_BYTES = 2**30
SMALL = ["data=synthetic", "data.num_images=200", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer=cpu", "trainer.max_epochs=1"]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 2**63, 10**30, 1e308, float("nan"), 7.5, "", "x", "\x00", "../x", "é\udce9", b"x", (1,), [], {},
    [[]], {"a": 1}, ["x"], {"_target_": "os.system"},
]  # fmt: skip
Damage = Callable[[random.Random], Any]
Kind = tuple[Damage, Callable[[Any], None]]  # makes a damaged file from chance; reads it as the program does


# Bytes


def bytes_changed(data: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, cut out, doubled or put in; or the end cut off."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(out)) if out else 0
        kind = chance.randrange(5)
        if kind == 0 and out:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and out:
            out[at] = chance.randrange(256)
        elif kind == 2:
            del out[at : at + chance.choice((1, 4, 64, 4096))]
        elif kind == 3:
            out[at:at] = out[at : at + chance.choice((1, 8, 512))]
        else:
            out[at:at] = chance.randbytes(chance.choice((1, 4, 16)))
    if chance.random() < 0.1:
        del out[chance.randrange(len(out) + 1) :]
    return bytes(out)


def values_changed(tree: Any, chance: random.Random) -> Any:
    """The same tree of plain values with an odd one somewhere, or a key or item gone."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        if chance.random() < 0.15:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: values_changed(tree[key], chance)}
    if isinstance(tree, list | tuple) and tree and chance.random() < 0.8:
        at, items = chance.randrange(len(tree)), list(tree)
        if chance.random() < 0.15:
            del items[at]
        else:
            items[at] = values_changed(items[at], chance)
        return type(tree)(items)
    return chance.choice(ODD)


# Checkpoints


def zip_of(files: dict[str, bytes], **options: Any) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return made.getvalue()


def directory_changed(data: bytes, chance: random.Random) -> bytes:
    """Sizes, places, names and methods in the zip's own list of files: other numbers, or the same ones multiplied."""
    out = bytearray(data)
    places = [i for i in range(len(out) - 46) if out[i : i + 4] == b"PK\x01\x02"]
    end = data.rfind(b"PK\x05\x06")
    for _ in range(chance.choice((1, 1, 2, 4))):
        start, fields = chance.choice([
            (chance.choice(places), ((10, "H"), (16, "I"), (20, "I"), (24, "I"), (28, "H"), (42, "I"))),
            (end, ((8, "H"), (10, "H"), (12, "I"), (16, "I"), (20, "H"))),
        ])  # fmt: skip
        offset, form = chance.choice(fields)
        [old] = struct.unpack_from(f"<{form}", out, start + offset)
        largest = 2 ** (8 * struct.calcsize(form)) - 1
        new = chance.choice((old * 2, old * 1024, old + 1, max(old - 1, 0), 0, largest, chance.randrange(largest)))
        struct.pack_into(f"<{form}", out, start + offset, min(new, largest))
    return bytes(out)


def pickle_changed(data: bytes, chance: random.Random) -> bytes:
    """Instructions changed, doubled or left out, numbers multiplied, names replaced."""
    places = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    pieces = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    bombs = (
        b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR", b"cposix\nsystem\n(X\x04\x00\x00\x00truetR", b"]q\x000", b".",
        b"r\xff\xff\xff\x7f", b"(" * 200, b"]" * 5000 + b"a" * 4999, b"h\x00h\x00\x86", b"\x8a\xff" + b"\x7f" * 255,
    )  # fmt: skip
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, kind = chance.randrange(len(pieces)), chance.randrange(6)
        if kind == 0:
            pieces[at] = chance.choice(pieces)
        elif kind == 1:
            pieces[at] = b""
        elif kind == 2:
            pieces[at] = chance.choice(bombs) + pieces[at]
        elif kind == 3:
            numbers = [i for i, one in enumerate(pieces) if one[:1] in (b"K", b"M", b"J")]
            new = chance.choice((2**31 - 1, -1, 0, 2**20, chance.randrange(2**31)))
            pieces[chance.choice(numbers)] = b"J" + struct.pack("<i", new)
        elif kind == 4:
            pieces[at] = bytes([chance.randrange(256)]) + pieces[at][1:]
        else:
            pieces[at] = pieces[at] * chance.choice((2, 3))
    return b"".join(pieces)


def checkpoint_damage(sample: bytes) -> Damage:
    import torch

    with zipfile.ZipFile(io.BytesIO(sample)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [main] = [name for name in files if name.endswith("/data.pkl")]
    content = torch.load(io.BytesIO(sample), weights_only=True)

    def damage(chance: random.Random) -> bytes:
        kind = chance.randrange(10)
        if kind == 0:
            return bytes_changed(sample, chance)
        if kind == 1:
            return directory_changed(sample, chance)
        if kind in (2, 3):
            return zip_of({**files, main: pickle_changed(files[main], chance)})
        if kind == 4:
            return zip_of({**files, main: bytes_changed(files[main], chance)})
        if kind == 5:
            name = chance.choice(list(files))
            return zip_of(
                {**files, name: files[name][: chance.randrange(len(files[name]) + 1)] * chance.choice((1, 3))}
            )
        if kind == 6:
            return zip_of(files, compression=zipfile.ZIP_DEFLATED)
        made = io.BytesIO()
        torch.save(values_changed(content, chance), made)
        return made.getvalue()

    return damage


def real_checkpoint(folder: Path) -> Path:
    """Of a small run, made as every run makes it."""
    from lockstep.storage.checkpoint_files import complete
    from runs import run_door

    done = run_door("train", *SMALL, "run_id=r", logs=folder)
    assert done.code == 0, done.output
    return next(path for path, _ in complete(done.folder.checkpoints, "best"))


def checkpoints(sample: Path, folder: Path) -> Kind:
    """What is read is built as predict.py builds it."""
    from lockstep.callbacks.checkpoint_io import read_checkpoint
    from lockstep.training.weights import start_from

    path = folder / "damaged.ckpt"
    module = module_of(sample)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        read_checkpoint(path)
        start_from(module, str(path), "small_cnn", {"name": "synthetic", "seed": 0, "image_size": 8}, "")

    return checkpoint_damage(sample.read_bytes()), check


def module_of(checkpoint: Path) -> Any:
    from lockstep.training.build import build_module
    from lockstep.training.inference import load_finished

    finished = load_finished(str(checkpoint), checkpoint.parent)
    return build_module(finished.config, finished.facts, trainable=False)


def shard_folders(sample: Path, folder: Path) -> Kind:
    """The manifest states the damaged file's new size in half of them, so that what reads the file sees it."""
    import torch

    from lockstep.strategies.sharded_checkpoint import MANIFEST, REST, load_checkpoint

    whole = shards_of(torch.load(sample, weights_only=True), folder / "whole.ckpt")
    rest_damage = checkpoint_damage((whole / REST).read_bytes())
    names = sorted(path.name for path in whole.iterdir())

    def damage(chance: random.Random) -> dict[str, bytes]:
        files = {name: (whole / name).read_bytes() for name in names}
        name = chance.choice(names)
        if name == REST:
            files[name] = rest_damage(chance)
        elif name == MANIFEST and chance.random() < 0.7:
            files[name] = json.dumps(values_changed(json.loads(files[name]), chance), default=str).encode()
        elif name != MANIFEST and chance.random() < 0.7:
            files[name] = header_changed(files[name], chance)
        else:
            files[name] = bytes_changed(files[name], chance)
        if name != MANIFEST and chance.random() < 0.8:
            manifest = json.loads(files[MANIFEST])
            manifest["files"][name]["bytes"] = len(files[name])
            files[MANIFEST] = json.dumps(manifest).encode()
        return files

    def check(files: dict[str, bytes]) -> None:
        place = folder / "damaged.ckpt"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        load_checkpoint(place)

    return damage, check


def header_changed(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose head states other shapes, types and places."""
    length = struct.unpack_from("<Q", data)[0]
    head = json.loads(data[8 : 8 + length])
    name = chance.choice([name for name in head if name != "__metadata__"])
    new = chance.choice([
        {"shape": [10**6, 10**6]}, {"shape": [2**62, 4]}, {"shape": [-1]}, {"shape": []}, {"dtype": "F64"},
        {"dtype": "X"}, {"data_offsets": [0, 2**40]}, {"data_offsets": [5, 1]}, {"data_offsets": [0, 0], "shape": [0]},
    ])  # fmt: skip
    kind = chance.randrange(4)
    if kind == 0:
        head[name].update(new)
    elif kind == 1:
        head = values_changed(head, chance)
    elif kind == 2:
        held = json.loads(head["__metadata__"]["DCP_SHARDING_INFO"])
        head["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(values_changed(held, chance), default=str)
    else:
        return struct.pack("<Q", chance.choice((0, 1, length + 1, 2**40, 2**63))) + data[8:]
    made = json.dumps(head, default=str).encode()
    return struct.pack("<Q", len(made)) + made + data[8 + length :]


def shards_of(checkpoint: dict[str, Any], folder: Path) -> Path:
    """The same checkpoint as one rank would write it in shards."""
    import torch.distributed as dist

    from lockstep.strategies.sharded_checkpoint import write

    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        try:
            write(checkpoint, folder, first_on_node=True)
        finally:
            dist.destroy_process_group()
    return folder


# Small files of a run folder


def record_files(sample: Path, folder: Path) -> Kind:
    """run.json, config.yaml and every CSV, by all that reads a run folder: resume, pages."""
    from example_runs import write_run
    from lockstep.pages.build import build
    from lockstep.pages.run_page import write_run_page
    from lockstep.runs.folder import read_config
    from lockstep.runs.record import read_record, status_of

    run = write_run(folder, "run-1")
    names = ["run.json", "run.json", "config.yaml", "metrics.csv", "hardware-node0.csv", "confusion_matrix.csv"]
    whole = {name: (run / name).read_bytes() for name in names}

    def damage(chance: random.Random) -> tuple[str, bytes]:
        name = chance.choice(names)
        if name == "run.json" and chance.random() < 0.8:
            return name, json.dumps(values_changed(json.loads(whole[name]), chance), default=str).encode()
        return name, bytes_changed(whole[name], chance)

    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        try:
            (run / name).write_bytes(data)
            said: list[Exception] = []
            for read in (
                lambda: status_of(read_record(run / "run.json")),
                lambda: read_config(run / "config.yaml"),
                lambda: write_run_page(run),
                lambda: build(folder / "logbook", [run]),
            ):
                try:
                    read()
                except REFUSALS as error:
                    said.append(error)
            if said:
                raise said[0]
        finally:
            (run / name).write_bytes(whole[name])
            shutil.rmtree(folder / "logbook", ignore_errors=True)

    return damage, check


def metrics_files(sample: Path, folder: Path) -> Kind:
    """A run goes on: its table is read, cut at the step, and written on."""
    from lockstep.callbacks.metrics_csv import MetricsCsv
    from lockstep.callbacks.training_log import last_time_s
    from lockstep.pages.curves import training_curves

    path = folder / "metrics.csv"
    log = MetricsCsv(path)
    for step in range(1, 40):
        log.log_metrics({"epoch": step // 10, "time_s": step / 2, "train/loss": 1 / step}, step)
    log.finalize("")
    whole = path.read_bytes()

    def damage(chance: random.Random) -> bytes:
        lines = whole.split(b"\n")
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(lines))
            odd = (
                b",7",
                b"\xff",
                b'"',
                b"\0",
                b",=1",
                b"9" * 5000,
                b"nan",
                b"\r",
                b"\xef\xbb\xbf",
                "²".encode(),
                b"-1",
            )
            lines[at] = chance.choice(
                (lines[at] + chance.choice(odd), chance.choice(odd) + lines[at], chance.choice(odd))
            )
        data = b"\n".join(lines)
        return data if chance.random() < 0.5 else bytes_changed(data, chance)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        last_time_s(path)
        training_curves(path)
        log = MetricsCsv(path, resume_step=25)
        log.log_metrics({"epoch": 2, "val/acc": 0.5}, 25)
        log.log_metrics({"epoch": 2, "time_s": 20.0, "new": 1}, 26)
        log.finalize("")
        assert path.read_text(encoding="utf-8").rstrip().splitlines()[-1].startswith("26,")

    return damage, check


def small_files(sample: Path, folder: Path) -> Kind:
    """What lies beside a checkpoint and in a bucket: sidecar, pointer, manifest, the outbox's items, a cache's meta."""
    from lockstep.data.node_cache import read_meta
    from lockstep.storage.checkpoint_files import fault_of, newest_whole, sidecar_path
    from lockstep.storage.outbox import Outbox
    from lockstep.storage.pointer import parse_pointer
    from lockstep.storage.shards import read_manifest

    checkpoint = folder / "last-step00000010.ckpt"
    checkpoint.write_bytes(b"x" * 10)
    entry = folder / "upload" / "rank00000-last-step00000010"
    hashed = {"bytes": 10, "sha256": "ab" * 32}
    sidecar = {**hashed, "step": 10, "epoch": 1, "metric": {"val/acc": 0.5}}
    pointer = {
        **sidecar,
        "key": "p/r/checkpoints/best-step00000010-g0001-abababab.ckpt",
        "run_id": "r",
        "generation": 1,
    }
    kinds: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
        "sidecar": (sidecar,
                    lambda data: (put(sidecar_path(checkpoint), data), fault_of(checkpoint), newest_whole(folder))),
        "pointer": ({**pointer, "previous": pointer}, lambda data: parse_pointer(data, "p/r/")),
        "manifest": ({"format": 1, "world_size": 1, "files": {"shard-1.safetensors": hashed}}, read_manifest),
        "meta": ({"files": {"last-step00000010.ckpt": 10}, "content": {}},
                 lambda data: (put(folder / "meta.json", data), read_meta(folder))),
        "item": ({"kind": "last", "name": "x", "sidecar": sidecar, "generation": 1},
                 lambda data: (put(entry / "x", b""), put(entry / "item.json", data), Outbox(entry.parent).left())),
        "notes": ({"generation": 1, "flush_left_s": 1.0},
                  lambda data: (put(folder / "upload" / "start.json", data), Outbox(folder / "upload").notes())),
    }  # fmt: skip

    def damage(chance: random.Random) -> tuple[str, bytes]:
        name = chance.choice(sorted(kinds))
        if chance.random() < 0.7:
            return name, json.dumps(values_changed(kinds[name][0], chance), default=str).encode()
        return name, bytes_changed(json.dumps(kinds[name][0]).encode(), chance)

    def check(example: tuple[str, bytes]) -> None:
        kinds[example[0]][1](example[1])

    return damage, check


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def yaml_files(sample: Path, folder: Path) -> Kind:
    """A run's config, with aliases, depth and odd values."""
    from example_runs import example_config
    from lockstep.pages.source import flatten
    from lockstep.runs.folder import read_config
    from lockstep.runs.redact import redact, refuse_secrets

    path = folder / "config.yaml"

    def damage(chance: random.Random) -> bytes:
        kind = chance.randrange(4)
        text = yaml.safe_dump(values_changed(example_config(), chance) if kind else example_config()).encode()
        if kind == 1:
            return text + aliases(chance)
        if kind == 2:
            depth = chance.choice((10, 60, 1000, 100_000))
            return text + b"deep: " + chance.choice((b"[", b"{a: ", b"- ")) * depth
        return text if kind == 3 else bytes_changed(text, chance)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        config = read_config(path)
        flatten(redact(config))
        refuse_secrets(config)

    return damage, check


def aliases(chance: random.Random) -> bytes:
    """Each line repeats the one before some times: a few hundred bytes that stand for up to billions of values."""
    times, lines = chance.randrange(1, 10), chance.randrange(1, 12)
    form = chance.choice(("[{}]", "{{<<: [{}]}}"))
    first = chance.choice(("[x, x]", "{a: 1}", "&x0 [*x0]"))
    text = f"x0: {first if first.startswith('&') else '&x0 ' + first}\n"
    for i in range(1, lines + 1):
        text += f"x{i}: &x{i} {form.format(', '.join([f'*x{i - 1}'] * times))}\n"
    return text.encode()


def meeting_lines(sample: Path, folder: Path) -> Kind:
    """What a caller sends to node 0, without a secret, so that all of it is read; node 0 waits on, or says why not."""
    from lockstep.distributed.cluster import Cluster
    from lockstep.distributed.meeting_lines import Hello
    from lockstep.distributed.rendezvous import Gathering
    from lockstep.distributed.supervisor import free_port
    from lockstep.runs.errors import UserError
    from lockstep.runs.typed_json import to_json

    port, threads, answers = free_port(), [], []
    versions = {"python": "3.11", "torch": "2.14"}
    hello = Hello(tree_hash="a", config_hash="b", versions=versions, host="node", node_rank=0, num_nodes=2)

    def wait_for_node() -> None:
        cluster = Cluster("nodes", 2, 1, 0, None, "127.0.0.1", port)
        answers.append(Gathering(cluster, hello, lambda text: None).answer(600.0))

    def damage(chance: random.Random) -> bytes:
        tree = {**to_json(hello), "node_rank": 1, "time": 1e9}
        body = json.dumps(values_changed(tree, chance), default=str).encode()
        if chance.random() < 0.3:
            body = chance.choice((b"[" * 30_000, b'{"a":' * 10_000, bytes_changed(body, chance)))
        line = b"ab" * 16 + b" - " + body
        return (line if chance.random() < 0.8 else bytes_changed(line, chance)) + b"\n"

    def check(line: bytes) -> None:
        if not threads or not threads[-1].is_alive():
            threads.append(threading.Thread(target=wait_for_node, daemon=True))
            threads[-1].start()
        asked = len(answers)
        for _ in range(200):  # until it listens
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=2)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        with connection:
            connection.recv(200)
            connection.sendall(line)
            connection.settimeout(0.05)  # a whole hello waits for the others; anything else is sent away at once
            with contextlib.suppress(OSError):
                if connection.recv(200):  # an answer: the meeting is over
                    threads[-1].join()
        if len(answers) == asked and not threads[-1].is_alive():
            raise RuntimeError("node 0 ended without an answer")
        if len(answers) > asked and answers[-1].error:
            raise UserError(answers[-1].error)

    return damage, check


KINDS: dict[str, Callable[[Path, Path], Kind]] = {
    "checkpoints": checkpoints, "folders of shards": shard_folders, "run folders": record_files,
    "metrics.csv": metrics_files, "small files": small_files, "YAML": yaml_files,
    "lines to node 0": meeting_lines,
}  # fmt: skip


# Reading them


class TooLong(BaseException):
    """No Exception: nothing that reads a file may take it for damage."""


def _refusals() -> tuple[type[Exception], ...]:
    from lockstep.runs.errors import UserError
    from lockstep.storage.object_store import StoreError

    return UserError, StoreError


REFUSALS = _refusals()


@dataclass
class Seen:
    """What a kind of file came to. grown: bytes by which the process's memory grew at most."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    grown: int = 0
    wrong: list[str] = field(default_factory=list)


def damaged(name: str, sample: Path, seed: int, numbers: range, folder: Path) -> Seen:
    """Read damaged files of one kind; file number n is the same for the same seed."""
    seen, left = Seen(), numbers
    while left and len(seen.wrong) < 20:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(name, sample, seed, left, folder, theirs)
        )
        process.start()
        theirs.close()
        last = _follow(ours, seen, name)
        process.join(1.0)
        if process.exitcode is None:
            process.kill()
            process.join()
        if last is None:
            return seen
        seen.wrong.append(f"{name} {last}: the process ended with {process.exitcode} or hung")
        left = range(last + 1, numbers.stop)
    return seen


def _follow(pipe: Any, seen: Seen, name: str) -> int | None:
    """None once the process is done; else the number of the file that it did not survive."""
    number: int | None = None
    while True:
        try:
            if not pipe.poll(SILENT_S + (300 if number is None else 0)):
                return number
            word, value = pipe.recv()
        except EOFError:
            return -1 if number is None else number
        if word == "done":
            return None
        if word == "begins":
            number = value
        elif word == "wrong":
            seen.wrong.append(f"{name} {number}: {value}")
        else:
            how, seconds, grown = value
            seen.read += how == "read"
            seen.refused += how == "refused"
            seen.slowest_s, seen.grown = max(seen.slowest_s, seconds), max(seen.grown, grown)


def _work(name: str, sample: Path, seed: int, numbers: range, folder: Path, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(dir=folder))
    silence()
    make, check = KINDS[name](sample, place)
    check_once(make, check, seed, name)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + GROWTH_BYTES, now + GROWTH_BYTES))
    before = peak()
    signal.signal(signal.SIGALRM, _too_long)
    for number in numbers:
        example = make(random.Random(f"{seed} {name} {number}"))
        pipe.send(("begins", number))
        how, began = "read", time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            check(example)
        except REFUSALS as error:
            how = "refused"
            if len(str(error).splitlines()) != 1:
                pipe.send(("wrong", f"not one line: {str(error)[:300]!r}"))
        except BaseException as error:
            how = "wrong"
            where = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send(
                ("wrong", f"{type(error).__name__}: {str(error)[:200]} at {Path(where.filename).name}:{where.lineno}")
            )
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(("seen", (how, time.monotonic() - began, peak() - before)))
    pipe.send(("done", None))
    os._exit(0)


def check_once(make: Damage, check: Callable[[Any], None], seed: int, name: str) -> None:
    """Imports what is imported late, which takes its seconds and its memory once."""
    for number in range(10):
        try:
            check(make(random.Random(f"{seed} {name} warm {number}")))
        except Exception:  # whether one may be raised, the run that is counted tells
            continue


def silence() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _too_long(*_: object) -> None:
    raise TooLong(f"more than {LIMIT_S:g} s")


def row_of(name: str, times: int, seen: Seen, seconds: float) -> Row:
    said = (
        f"{seen.refused} refused by a sentence, {seen.read} read, none by a traceback; slowest {seen.slowest_s:.2f} s, "
    )
    return Row("damage", f"damaged {name}", times, said + f"memory +{seen.grown / 2**20:.0f} MiB", seconds, seen.wrong)


@piece("damage", 10_000)
def damage(task: Task) -> list[Row]:
    rows, sample = [], real_checkpoint(task.folder / "run")
    for name in KINDS:
        clock, times = Clock(), task.count if name == "checkpoints" else task.count // 4
        seen = damaged(name, sample, task.seed, range(times), task.folder)
        rows.append(row_of(name, times, seen, clock.seconds))
        task.say(f"{name}: {rows[-1].seen}; {seen.wrong or 'fine'}")
    return rows

"""Somebody who may write to a run's bucket, and writes anything at any time beside the run.

What must hold: nothing of theirs runs, nothing is written outside, and whatever reads the bucket ends well or by one
sentence of its own.
"""

import hashlib
import io
import json
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from campaign import Clock, Row, Task, piece
from object_store import object_store
from runs import run_door
from signals import no_store

SMALL = [
    "data=synthetic", "data.num_images=320", "data.num_val=64", "data.num_test_images=64", "data.image_size=8",
    "data.global_batch_size=64", "model=small_cnn", "trainer=cpu", "trainer.num_threads=1", "s3.last_interval_s=0.2",
    "s3.files_interval_s=0.2", "callbacks.checkpoints.every_minutes=0.005", "s3.flush_timeout_s=5",
]  # fmt: skip
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
LONGEST_S = 45.0  # of a process that needs 3 s where nobody writes beside it
DEEP = "[" * 50_000 + "]" * 50_000


class Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


class Poisoner:
    """Writes to `<prefix>/<run_id>/` from a thread of its own until it is stopped.

    Attributes:
        tries: how often it has changed something.
    """

    def __init__(self, client: Any, bucket: str, root: str, canary: Path, chance: random.Random) -> None:
        self.client, self.bucket, self.root, self.canary, self.chance = client, bucket, root, canary, chance
        self.tries = 0
        acts: list[Callable[[], None]] = [
            self.config, self.record, self.pointer, self.checkpoint, self.generation, self.text, self.stranger,
            self.delete, self.swap,
        ]  # fmt: skip
        self.acts = chance.sample(acts, 3)  # not all at once, or every reader would stop at the first of them
        self.good = {name: self.get(name) for name in self.keys()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Poisoner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(self.chance.random() * 0.2):
            try:
                self.chance.choice(self.acts)()
                self.tries += 1
                if self.chance.random() < 0.6:  # and puts back something of what was there
                    name = self.chance.choice(list(self.good))
                    self.put(name, self.good[name])
            except Exception:  # another act has deleted what this one reads
                continue

    def put(self, name: str, data: bytes | str) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.root + name, Body=data)

    def get(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=self.root + name)["Body"].read()
        return body

    def keys(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.root).get("Contents", [])
        return [entry["Key"].removeprefix(self.root) for entry in listed]

    def config(self) -> None:
        command, outside = f"touch '{self.canary}'", str(self.canary.parent)
        call = {"_target_": "os.system", "command": command}
        held = yaml.safe_load(self.get("config.yaml"))
        change: Callable[[dict[str, Any]], Any] = self.chance.choice([
            lambda c: c.update(callbacks={"x": call}, logger={"x": call}),
            lambda c: c["model"].update(extra=call),
            lambda c: c["model"].update(_target_="os.system", command=command),
            lambda c: c["overrides"].extend([f"+callbacks.x={{_target_: os.system, command: touch {self.canary}}}"]),
            lambda c: c["choices"].update(experiment=f"../../{self.root}evil", model="../../evil", data="../evil"),
            lambda c: c.update(task_name="../../..", paths=dict.fromkeys(c["paths"], outside), sweep_dir=outside),
            lambda c: c["data"].update(cache_dir=outside, name="../../outside", seed="${oc.env:HOME}"),
            lambda c: c["trainer"].update(max_epochs=10**9, strategy=call, profiler="simple", num_threads=-1),
            lambda c: c["data"].update(num_images=10**15, image_size=10**9, mean=[10**400]),
            lambda c: c.update(data=None, model=[], trainer="x", choices=7, overrides={"a": 1}),
            lambda c: c["callbacks"]["checkpoints"].update(folder=outside, monitor="../x", mode="x"),
            lambda c: c.update(s3={"uri": "s3://theirs/x", "endpoint_url": "http://127.0.0.1:9"}, resume="other"),
        ])  # fmt: skip
        change(held)
        exact = yaml.safe_dump(held)
        tag = f'a: !!python/object/apply:os.system ["{command}"]\n'
        texts = [exact, exact, exact, BOMB, DEEP, tag, b"\xff\xfe\x00", exact[: len(exact) // 2]]
        self.put("config.yaml", self.chance.choice(texts))

    def record(self) -> None:
        held = json.loads(self.get("run.json"))
        held["updated_at"] = "2999-01-01T00:00:00+00:00"
        held.update(self.chance.choice([
            {"run_id": "../../outside/x"}, {"steps": "abc"}, {"steps": 10**400}, {"status": ["x"]}, {"restarts": [7]},
            {"command": "\x1b[2J\x1b]0;x\x07"}, {"agent": {"_target_": "os.system"}}, {"schema_version": 10**9},
            {"best_checkpoint": {"path": "../../../outside/x"}}, {"status": "finished", "epochs": 10**12},
        ]))  # fmt: skip
        self.put("run.json", self.chance.choice([json.dumps(held), json.dumps(held), DEEP, "{", "[]", b"\xff" * 100]))

    def pointer(self) -> None:
        name = self.chance.choice(["best.json", "last.json"])
        held = json.loads(self.get(name))
        inside = f"{self.root}checkpoints/"
        held.update(self.chance.choice([
            {"key": "../../outside/x"}, {"key": f"{inside}../../x.ckpt"}, {"bytes": -1}, {"step": 10**400},
            {"sha256": "0" * 64}, {"sha256": "../x"}, {"step": "1"}, {"generation": 10**9}, {"previous": held},
            {"metric": {"val/acc": "nan"}}, {"bytes": 10**18}, {"key": f"{inside}x/manifest.json"},
        ]))  # fmt: skip
        self.put(name, self.chance.choice([json.dumps(held), json.dumps(held), DEEP, "null", b"\x00"]))

    def checkpoint(self) -> None:
        """A whole one with its right hash, which a pointer names."""
        name = self.chance.choice(["best.json", "last.json"])
        held, file = json.loads(self.get(name)), io.BytesIO()
        content = torch.load(io.BytesIO(self.client.get_object(Bucket=self.bucket, Key=held["key"])["Body"].read()),
                             weights_only=True)  # fmt: skip
        kind = self.chance.randrange(5)
        if kind == 0:
            file.write(pickle.dumps({**content, "x": Payload(self.canary)}, 2))
        elif kind == 1:
            torch.save({**content, "optimizer_states": [{"state": {0: Payload(self.canary)}}]}, file)
        elif kind == 2:
            call = {"_target_": "os.system", "command": f"touch '{self.canary}'"}
            content["lockstep"]["config"]["model"]["extra"] = call
            torch.save(content, file)
        elif kind == 3:
            content["state_dict"] = {"net.x": torch.zeros(1).expand(10**9)}
            torch.save(content, file)
        else:
            torch.save({"state_dict": 7, "lockstep": {"config": [], "data": 3}, "loops": None}, file)
        data = file.getvalue()
        digest, step = hashlib.sha256(data).hexdigest(), int(held["step"]) + 1
        key = f"checkpoints/{name.removesuffix('.json')}-step{step:08d}-g{held['generation']:04d}-{digest[:8]}.ckpt"
        self.put(key, data)
        held.update(key=self.root + key, bytes=len(data), sha256=digest, step=step)
        self.put(name, json.dumps(held))

    def generation(self) -> None:
        said = self.chance.choice([{"generation": 10**30}, {"generation": -1}, {"generation": "x"}, {}, [], 7, None])
        self.put("generation.json", self.chance.choice([json.dumps(said), "{", b"\xff", DEEP]))

    def text(self) -> None:
        name = self.chance.choice([
            "metrics.csv", "confusion_matrix.csv", "train.log", "code.diff", "hardware-node0.csv",
            "tensorboard/events.out.tfevents.1", "nvidia-smi-node0-start.txt",
        ])  # fmt: skip
        lines = "step,epoch,time\n1,2,3,4,5,6\n=cmd|' /C x'!A0,,\n"
        self.put(name, self.chance.choice([lines, b"\xff\xfe" * 50, "\x1b[2J", "x" * 10**6, "", "a\n" * 10**5]))

    def stranger(self) -> None:
        """Files that no run writes there, under names that climb or that a start would read."""
        name = self.chance.choice([
            "plan-node0.yaml", "config-node1.yaml", "defaults.yaml", "evil.yaml", "error-rank0.json", ".alive",
            "upload/x.json", "checkpoints/best-step99999999.ckpt", "checkpoints/best-step99999999.ckpt.json",
            "tensorboard/x/../../../y",
            "from-bucket/config.yaml", "a" * 500 + ".csv", "x\ny.csv", "%2e%2e%2fx.csv",
        ])  # fmt: skip
        self.put(name, f"_target_: os.system\ncommand: touch {self.canary}\n")

    def delete(self) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.root + self.chance.choice(self.keys()))

    def swap(self) -> None:
        one, other = self.chance.sample(self.keys(), 2)
        self.put(one, self.get(other))


def poisoned_round(store: Any, folder: Path, chance: random.Random, faults: list[str]) -> int:
    """A run fills its bucket; another machine takes it over and others read it, all beside a poisoner.

    Returns:
        How often something was changed.
    """
    bucket, outside = store.new_bucket(), folder / "outside"
    outside.mkdir(parents=True)
    address = [f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}"]
    options: dict[str, Any] = {"environment": store.environment()}
    first = run_door("train", *SMALL, *address, "run_id=r", "trainer.max_epochs=2", logs=folder / "first", **options)
    if first.code != 0:
        return faults.append(f"the first run: {first.output[-300:]}") or 0
    again = [*address, "resume=auto", "run_id=r", "s3.flush_timeout_s=5"]
    scripts = [
        ("train", [*again, "trainer.max_epochs=4"], "second"),
        ("train", [*again, "trainer.max_epochs=5"], "second"),
        ("eval", [f"ckpt_path=s3://{bucket}/p/r", address[1]], "second"),
        ("train", [*address, *SMALL, f"ckpt_path=s3://{bucket}/p/r", "trainer.max_epochs=1", "run_id=r"], "third"),
    ]  # fmt: skip
    with Poisoner(store.client(), bucket, "p/r/", outside / "canary", chance) as poisoner:
        for script, words, place in scripts:
            began = time.monotonic()
            done = run_door(script, *words, logs=folder / place, **options)
            if (took_s := time.monotonic() - began) > LONGEST_S:
                faults.append(f"{script} {' '.join(words)} took {took_s:.0f} s: {done.output[-1500:]}")
            ended = done.code == 0 or "error: " in done.output or "not uploaded" in done.output
            if "Traceback" in done.output or not ended:
                faults.append(f"{script} {' '.join(words)}: {done.code} {done.output[-1500:]}")
    for path in outside.iterdir():
        faults.append(f"written outside: {path}")
    if strays := {path.name for path in folder.iterdir()} - {"first", "second", "third", "outside"}:
        faults.append(f"written outside: {strays}")
    return poisoner.tries


@piece("poisoner", 500, no_store)
def poisoner(task: Task) -> list[Row]:
    clock, wrong, tries, rounds = Clock(), [], 0, 0
    with object_store(task.folder / "store") as store:
        while tries < task.count and not task.over():
            rounds += 1
            tries += poisoned_round(store, task.folder / f"round{rounds}", task.chance, wrong)
            task.say(f"{tries} changes in {rounds} rounds, {len(wrong)} wrong")
    seen = f"no canary, nothing outside, in {rounds} rounds of 5 processes each that ended well or by a sentence"
    return [Row("poisoner", "writes of anything beside a run", tries, seen, clock.seconds, wrong)]

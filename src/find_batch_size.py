"""Find the largest batch that trains under any trainer, by a few real steps in processes that end.

    python src/find_batch_size.py model=… data=… trainer=…            on the hardware at hand
    python src/find_batch_size.py … trainer=fsdp hardware=g4dn.xlarge --estimate    without it

data.global_batch_size=max in train.py does the same and trains with what was found.
"""

import copy
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cluster as world
from batch_search import Probe, next_batch
from batch_sessions import (
    EXIT_OUT_OF_MEMORY,
    EXIT_PEER_ENDED,
    SessionFiles,
    find_largest,
    from_json,
    read_state,
    write_state,
)
from compose import chosen_options, plain, run_door
from errors import EXIT_OK, EXIT_USER_ERROR, UserError
from leave import leave

GIB = 2**30
MEMORY_SHARE_OF_CPU = 0.8  # of what is free: the tracker sees tensors only
PEER_INTERVAL_S = 0.5


def find(cfg: Any) -> int:
    """The door's task: search, print, record."""
    from launch import agree_on_run, describe_batch, resolve_cluster
    from run_files import RunFolder, new_run_id, read_record, utc_now, write_record
    from run_start import begin

    config = plain(cfg)
    environment = world.environment()
    config["choices"] = chosen_options(cfg)
    cluster = resolve_cluster(config, environment)
    config["overrides"], config["task_name"] = list(cfg.hydra.overrides.task), "find_batch_size"
    if cluster.is_supervisor:
        agree_on_run(config, cluster, environment)
    largest = find_largest(config, cluster, environment)
    if not cluster.is_rank_zero:
        return EXIT_OK
    fields = largest.record()
    config["data"]["global_batch_size"] = fields["global"]
    describe_batch(config, cluster)
    folder = RunFolder(Path(config["paths"]["log_dir"]) / config["task_name"] / "runs" / new_run_id())
    begin(config, cluster, folder, fresh=True)
    record = read_record(folder.record)
    record.update(
        status="finished", phase="end", exit_code=0, finished_at=utc_now(), largest_batch=fields,
        peak_memory_gib=fields["peak_memory_gib"],
    )  # fmt: skip
    write_record(folder.record, record)
    print(sentence(fields, config, cluster), flush=True)
    return EXIT_OK


def two_steps(accumulate: int, steps_per_epoch: int) -> dict[str, Any]:
    """The trainer's options for two optimizer steps and a validation batch."""
    return {
        "accumulate_grad_batches": accumulate, "max_epochs": 2 // steps_per_epoch, "max_steps": -1,
        "limit_train_batches": accumulate * steps_per_epoch, "limit_val_batches": 1, "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
    }  # fmt: skip


def sentence(fields: dict[str, Any], config: dict[str, Any], cluster: Any) -> str:
    """What was found, in one line."""
    accumulate = config["trainer"]["accumulate_grad_batches"]
    bound = " (all the data there is)" if fields["bounded_by"] == "data set" else ""
    return (
        f"largest batch {fields['per_device']} per device{bound}, {fields['global']} global = "
        f"{fields['per_device']} × {cluster.world_size} × {accumulate} · {fields['probes']} probes, "
        f"{fields['out_of_memory']} out of memory, {fields['seconds']:.0f} s · "
        f"peak {fields['peak_memory_gib']:.3g} of {fields['limit_gib']:.3g} GiB"
    )


def probe_in_rank(config_path: str) -> int:
    """A child's life: probe what is to be probed next, with all other ranks, until the search is over."""
    import yaml

    from supervisor import die_with_parent

    environment = world.environment()
    die_with_parent(int(environment["LOCKSTEP_SUPERVISOR"]))
    config = yaml.safe_load(Path(config_path).read_text())
    cluster = world.describe(environment, devices=None, num_nodes=None, several_processes=True, machine=1)
    world.adopt(cluster)
    try:
        return Prober(config, cluster, SessionFiles(Path(config_path).parent)).run()
    except UserError as error:
        SessionFiles(Path(config_path).parent).error.write_text(str(error))
        return EXIT_USER_ERROR


class Prober:
    """One rank of a session."""

    def __init__(self, config: dict[str, Any], cluster: Any, files: SessionFiles) -> None:
        self.config, self.cluster, self.files = config, cluster, files
        self.num_train = 0
        self.parts = cluster.world_size * config["trainer"]["accumulate_grad_batches"]
        self.writes = False

    def run(self) -> int:
        """The whole session; returns the exit code."""
        self.prepare()
        mine = read_state(self.files)
        self.writes = mine["writer"] == (self.cluster.local_rank or 0)
        state = {**self._agree(mine), "writer": mine["writer"]}
        if state["known"]:
            self._keep(state)
            return self._leave()
        state["bound"] = self.num_train // self.parts
        if state["bound"] < 1:
            raise UserError(
                f"{self.num_train} training images are fewer than the {self.parts} parts of a global batch."
            )
        state["limit_gib"] = min(self._gather(self.meter.limit)) / GIB
        probes: list[Probe] = [from_json(probe) for probe in state["probes"]]
        while (batch := next_batch(probes, bound=state["bound"])) is not None:
            state["attempt"] = batch
            self._keep(state)
            self._gather(None)  # nobody runs out before it is written down at what
            shares = self._probe(batch)
            probes.append(Probe(batch, shares))
            state["probes"].append({"batch": batch, "shares": shares})
            self._keep(state)
        return self._leave()

    def prepare(self) -> None:
        """Meet the other ranks, open the data, find the limit."""
        import assemble
        import rank_process
        import targets

        targets.check_targets(self.config)
        rank_process.prepare_process(self.config, self.cluster)
        self._join()
        device = rank_process.device_of(self.config, self.cluster)
        self.num_train = assemble.build_data(self._of_batch(1), self.cluster, device).num_train
        self.meter = self._meter(device)

    def _probe(self, batch: int) -> list[dict[str, float]]:
        """Two steps and two validation batches under the real trainer; every rank's shares of its limit."""
        from callbacks.memory_phases import ran_out

        try:
            mine = self.train(batch)
        except Exception as error:
            if ran_out(error):
                self._end(EXIT_OUT_OF_MEMORY, f"{batch} images: {type(error).__name__}")
            if self.announced.is_set() or _peer_is_gone(error):
                self._end(EXIT_PEER_ENDED, f"{batch} images: another rank is gone ({type(error).__name__})")
            raise
        return self._gather(mine)

    def train(self, batch: int) -> dict[str, float]:
        """Two optimizer steps at this batch for each device; this rank's shares."""
        import assemble
        import rank_process
        from callbacks.memory_phases import MemoryPhases, TrackedBytes, untracked

        config = self._of_batch(batch)
        data = assemble.build_data(config, self.cluster, rank_process.device_of(config, self.cluster))
        gc.collect()
        meter = self.meter.fresh()
        with meter:
            module = assemble.build_module(config, assemble.data_facts(data))
            phases = MemoryPhases(meter)
            callbacks = [*_averaging(config), phases]
            trainer = assemble.build_trainer(config, self.cluster, callbacks, [], self.files.folder)
            if isinstance(meter, TrackedBytes):
                with untracked(data, meter):
                    trainer.fit(module, datamodule=data)
            else:
                trainer.fit(module, datamodule=data)
        return phases.shares

    def _of_batch(self, batch: int) -> dict[str, Any]:
        """The config whose steps are those of the training, cut down to two.

        The second begins with the gradients of the first, and DDP lays out its buckets anew. Two accumulated
        batches hold as much as many.
        """
        config = copy.deepcopy(self.config)
        accumulate = min(config["trainer"]["accumulate_grad_batches"], 2)
        size = batch * self.cluster.world_size * accumulate
        steps = 2 if 2 * size <= self.num_train else 1
        config["data"]["global_batch_size"] = size
        config["trainer"].update(two_steps(accumulate, steps))
        if config["trainer"]["accelerator"] == "cpu":
            config["trainer"]["compile"] = False  # the tracker sees operations one by one
        strategy = config["trainer"].get("strategy") or {}
        if "initial_peers" in strategy:
            strategy["initial_peers"] = []  # one peer, away from the swarm
        return config

    def _meter(self, device: Any) -> Any:
        import torch

        from callbacks.memory_phases import AllocatedBytes, TrackedBytes

        own = self.config["trainer"]
        fraction, stated = own.get("memory_fraction") or 1.0, own.get("memory_limit_gib")
        limit = int(stated * GIB) if stated else None
        if device.type == "cuda":
            alone = own["launch"] == "one_process" and own["devices"] != 1
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if alone else [device]
            return AllocatedBytes(devices, fraction, limit)
        if limit is None:
            import psutil

            limit = int(MEMORY_SHARE_OF_CPU * psutil.virtual_memory().available / self.cluster.devices)
            limit = min(self._gather(limit))
        return TrackedBytes(int(fraction * limit))

    def _join(self) -> None:
        """Meet the other ranks, and watch for the one that ends first."""
        import torch.distributed as dist

        self.announced = threading.Event()
        if self.cluster.world_size == 1:
            return
        from datetime import timedelta

        gpu = self.config["trainer"]["accelerator"] == "gpu"
        timeout = timedelta(seconds=self.config["trainer"]["timeout_s"])
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timeout)
        host, port = self.cluster.master_addr, self.cluster.master_port
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End when another rank has announced its end: a collective on a GPU would wait for it in vain."""
        while True:
            time.sleep(PEER_INTERVAL_S)
            try:
                ended = self.store.check(["ended"])
            except Exception as error:  # rank zero, which holds the store, is gone
                print(f"The ranks' store is gone ({type(error).__name__}).", flush=True)
                ended = True
            if ended:
                self.announced.set()
                time.sleep(PEER_INTERVAL_S)
                self._exit(EXIT_PEER_ENDED)

    def _end(self, code: int, why: str) -> None:
        """This rank's part is over at once: no clean-up that could wait for the others."""
        print(why, flush=True)
        if self.cluster.world_size > 1:
            try:
                self.store.set("ended", str(code))
            except Exception as error:
                print(f"The end could not be announced ({type(error).__name__}).", flush=True)
        self._exit(code)

    def _leave(self) -> int:
        """All ranks have written down what was found. Threads in the store's C++ would abort an orderly exit."""
        if self.cluster.world_size > 1:
            self._gather(None)
            self._exit(EXIT_OK)
        return EXIT_OK

    @staticmethod
    def _exit(code: int) -> None:
        sys.stdout.flush()
        os._exit(code)

    def _agree(self, state: dict[str, Any]) -> dict[str, Any]:
        """One history: a node whose ranks were ended early may have missed the last probe."""
        everyone = self._gather(state)
        longest = max(everyone, key=lambda own: len(own["probes"]))
        return copy.deepcopy(longest) | {"known": next((own["known"] for own in everyone if own["known"]), None)}

    def _keep(self, state: dict[str, Any]) -> None:
        if self.writes:
            write_state(self.files, state)

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        if self.cluster.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.cluster.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def _averaging(config: dict[str, Any]) -> list[Any]:
    """The moving average of the weights, which holds memory of its own."""
    if not config["trainer"]["ema_decay"]:
        return []
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return [EMAWeightAveraging(decay=config["trainer"]["ema_decay"])]


def _peer_is_gone(error: BaseException) -> bool:
    """What gloo and NCCL say when the other end of a connection has closed."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "ncclRemote",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--probe"]:
        config = world.supervised_config()
        assert config is not None, "--probe is for the search's own children"
        return probe_in_rank(config)
    task = find
    if "--estimate" in argv:
        from estimate import estimate

        argv, task = [word for word in argv if word != "--estimate"], estimate
    return run_door("train", argv, task, (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

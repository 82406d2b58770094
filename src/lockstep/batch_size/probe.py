"""One rank's life in a session of the batch search: probe, with all other ranks, what is to be probed next.

batch_sessions.py starts it, and ends it with all the others of its session.
"""

import copy
import gc
import logging
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml

from lockstep.batch_size.least_batch import least_batch
from lockstep.batch_size.memory import GIB, AllocatedBytes, MemoryPhases, TrackedBytes, ran_out, untracked
from lockstep.batch_size.peers import Peers, leave_at_once
from lockstep.batch_size.search import Probe, next_batch
from lockstep.batch_size.sessions import EXIT_OUT_OF_MEMORY, SessionFiles, from_json, read_state, write_state
from lockstep.callbacks.weight_average import WeightAverage
from lockstep.config import instantiate as targets
from lockstep.distributed import cluster as world
from lockstep.distributed.supervisor import die_with_parent
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.output import set_up
from lockstep.strategies.model_parallel import checked_devices
from lockstep.training import build as assemble
from lockstep.training import rank as rank_process

log = logging.getLogger(__name__)

MEMORY_SHARE_OF_CPU = 0.8  # of what is free: the tracker sees tensors only


def two_steps(accumulate: int, steps_per_epoch: int) -> dict[str, Any]:
    """The trainer's options for two optimizer steps and a validation batch."""
    return {
        "accumulate_grad_batches": accumulate, "max_epochs": 2 // steps_per_epoch, "max_steps": -1,
        "limit_train_batches": accumulate * steps_per_epoch, "limit_val_batches": 1, "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
    }  # fmt: skip


def main() -> int:
    """Probe until the search is over; returns the exit code."""
    set_up()
    environment = world.environment()
    config_path = world.supervised_config()
    assert config_path is not None, "this is for the search's own children"
    die_with_parent(int(environment["LOCKSTEP_SUPERVISOR"]))
    config = yaml.safe_load(Path(config_path).read_text())
    cluster = world.describe(environment, devices=None, num_nodes=None, several_processes=True, machine=1)
    world.adopt(cluster)
    return Prober(config, cluster, SessionFiles(Path(config_path).parent)).run()


class Prober:
    """One rank of a session."""

    def __init__(self, config: dict[str, Any], cluster: Any, files: SessionFiles) -> None:
        self.config, self.cluster, self.files = config, cluster, files
        self.num_train = 0
        self.facts: dict[str, Any] = {}
        self.parts = cluster.world_size * config["trainer"]["accumulate_grad_batches"]
        self.writes = False
        self.peers = Peers(None, cluster.rank)

    def run(self) -> int:
        """The whole session, and why it ended for the other ranks; returns the exit code."""
        try:
            return self._session()
        except UserError as error:
            self.files.error.write_text(str(error))
            self.peers.announce(EXIT_USER_ERROR)
            return EXIT_USER_ERROR
        except Exception as error:
            if (code := self.peers.code_of_peer(error)) is None:
                traceback.print_exc()
                self.peers.announce(code := EXIT_FAILED)
            else:
                log.info(f"Another rank ended first ({type(error).__name__}).")
            leave_at_once(code)

    def _session(self) -> int:
        self.prepare()
        mine = read_state(self.files)
        self.writes = mine["writer"] == (self.cluster.local_rank or 0)
        state = {**self._agree(mine), "writer": mine["writer"]}
        if state["known"]:
            self._keep(state)
            return self._leave()
        state["bound"] = self.num_train // self.parts
        state["least"] = least_batch(self.config, self.facts, self.cluster.world_size)
        if state["bound"] < state["least"]:
            raise UserError(
                f"{self.num_train} training images are too few for the {self.parts} parts of a global batch, each of "
                f"{state['least']} at least."
            )
        state["limit_gib"] = min(self._gather(self.meter.limit)) / GIB
        probes: list[Probe] = [from_json(probe) for probe in state["probes"]]
        while (batch := next_batch(probes, bound=state["bound"], least=state["least"])) is not None:
            state["attempt"] = batch
            self._keep(state)
            self._gather(None)  # nobody runs out before it is written down at what
            shares = self._probe(batch)
            probes.append(Probe(batch, shares))
            state["probes"].append({"batch": batch, "shares": shares})
            state["attempt"] = None
            self._keep(state)
        return self._leave()

    def prepare(self) -> None:
        """Meet the other ranks, open the data, find the limit."""
        targets.check_targets(self.config)
        rank_process.prepare_process(self.config, self.cluster)
        self._join()
        device = rank_process.device_of(self.config, self.cluster)
        data = assemble.build_data(self._of_batch(1), self.cluster, device)
        self.num_train, self.facts = data.num_train, assemble.data_facts(data)
        self.meter = self._meter(device)

    def _probe(self, batch: int) -> list[dict[str, float]]:
        """Two steps and two validation batches under the real trainer; every rank's shares of its limit."""
        try:
            mine = self.train(batch)
        except Exception as error:
            if ran_out(error):
                log.info(f"{batch} images: {type(error).__name__}")
                self.peers.announce(EXIT_OUT_OF_MEMORY)
                leave_at_once(EXIT_OUT_OF_MEMORY)  # no clean-up that could wait for the others
            raise
        return self._gather(mine)

    def train(self, batch: int) -> dict[str, float]:
        """Two optimizer steps at this batch for each device; this rank's shares."""
        config = self._of_batch(batch)
        data = assemble.build_data(config, self.cluster, rank_process.device_of(config, self.cluster))
        if config["test"]:
            evaluate_largest(data)
        gc.collect()
        meter = self.meter.fresh()
        with meter:
            module = assemble.build_module(config, assemble.data_facts(data))
            assemble.synchronise_batch_norm(module, config, self.cluster)
            phases = MemoryPhases(meter)
            callbacks = [*_averaging(config, self.cluster), phases]
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

    def _meter(self, device: torch.device) -> Any:
        own = self.config["trainer"]
        fraction, stated = own.get("memory_fraction") or 1.0, own.get("memory_limit_gib")
        limit = int(stated * GIB) if stated else None
        if device.type == "cuda":
            return AllocatedBytes(metered_devices(own, device), fraction, limit)
        if limit is None:
            limit = int(MEMORY_SHARE_OF_CPU * psutil.virtual_memory().available / self.cluster.devices)
            limit = min(self._gather(limit))
        return TrackedBytes(int(fraction * limit))

    def _join(self) -> None:
        """Meet the other ranks, and watch for the one that ends first."""
        if self.cluster.world_size == 1:
            return
        gpu = self.config["trainer"]["accelerator"] == "gpu"
        timeout = timedelta(seconds=self.config["trainer"]["timeout_s"])
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timeout)
        host, port = self.cluster.master_addr, self.cluster.master_port
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        self.peers = Peers(store, self.cluster.rank)
        self.peers.watch()

    def _leave(self) -> int:
        """All ranks have written down what was found. Threads in the store's C++ would abort an orderly exit."""
        if self.cluster.world_size > 1:
            self._gather(None)
            leave_at_once(EXIT_OK)
        return EXIT_OK

    def _agree(self, state: dict[str, Any]) -> dict[str, Any]:
        """One history: a node whose ranks were ended early may have missed the last probe."""
        everyone = self._gather(state)
        longest = max(everyone, key=lambda own: len(own["probes"]))
        return copy.deepcopy(longest) | {"known": next((own["known"] for own in everyone if own["known"]), None)}

    def _keep(self, state: dict[str, Any]) -> None:
        if self.writes:
            write_state(self.files, state)

    def _gather(self, value: Any) -> list[Any]:
        if self.cluster.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.cluster.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def metered_devices(own: dict[str, Any], device: torch.device) -> list[torch.device]:
    """The GPUs that this process computes on: those of the net's stages, those that share each batch, or its one.

    Args:
        own: the trainer's options.
        device: of a process that computes on one.
    """
    if "stage_devices" in own:
        stages = checked_devices(own["stage_devices"])
        return list(dict.fromkeys(torch.device("cuda", stage.index or 0) for stage in stages if stage.type == "cuda"))
    if "num_gpus" in own:
        return [torch.device("cuda", index) for index in range(own["num_gpus"] or torch.cuda.device_count())]
    return [device]


def evaluate_largest(data: Any) -> None:
    """Validate on the test images where their batches are larger: small splits have batches of their own size."""
    if data.test_dataloader().batch_size > data.val_dataloader().batch_size:
        data.val_dataloader = data.test_dataloader


def _averaging(config: dict[str, Any], cluster: world.Cluster) -> list[Any]:
    """The moving average of the weights, which holds memory of its own."""
    if not config["trainer"]["ema_decay"]:
        return []
    return [WeightAverage(config["trainer"]["ema_decay"], rank_process.device_of(config, cluster))]


if __name__ == "__main__":
    sys.exit(main())

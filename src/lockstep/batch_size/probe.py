"""One rank's life in a session of the batch search: probe, with all other ranks, what is to be probed next.

sessions.py starts it, and ends it with all the others of its session.
"""

import copy
import gc
import logging
import sys
import traceback
from dataclasses import replace
from typing import Any

import psutil

from lockstep.batch_size.least_batch import least_batch
from lockstep.batch_size.memory import GIB, AllocatedBytes, MemoryPhases, TrackedBytes, ran_out, untracked
from lockstep.batch_size.peers import Peers, leave_at_once
from lockstep.batch_size.search import Probe, next_batch
from lockstep.batch_size.sessions import (
    EXIT_OUT_OF_MEMORY,
    SessionFiles,
    State,
    from_json,
    mixes,
    read_state,
    write_state,
)
from lockstep.callbacks.ranks import gather_objects
from lockstep.callbacks.weight_average import WeightAverage
from lockstep.distributed.cluster import SUPERVISOR_PID, Wanted, adopt, environment, plan_file
from lockstep.distributed.launchers import describe
from lockstep.distributed.process_group import join
from lockstep.distributed.supervisor import die_with_parent
from lockstep.launch.plan import RunPlan, read_plan
from lockstep.runs.batch import Batch
from lockstep.runs.config import read_only, writable
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.output import set_up
from lockstep.strategies.collectives import let_go_of_what_was_sent
from lockstep.strategies.placement import without_peers
from lockstep.training.build import build_data, build_module, data_facts, prepare_net
from lockstep.training.checks import DataFacts
from lockstep.training.rank import device_of, devices_of, prepare_process
from lockstep.training.trainer import build_strategy, build_trainer

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
    environ, path = environment(), plan_file()
    assert path is not None, "this is for the search's own children"
    die_with_parent(int(environ[SUPERVISOR_PID]))
    plan = replace(read_plan(path), cluster=describe(environ, Wanted()))
    adopt(plan.cluster)
    return Prober(plan, SessionFiles(path.parent)).run()


class Prober:
    """One rank of a session."""

    def __init__(self, plan: RunPlan, files: SessionFiles) -> None:
        self.plan, self.cluster, self.files = plan, plan.cluster, files
        self.num_train = 0
        self.facts: DataFacts = {}
        self.parts = plan.cluster.world_size * plan.batch.accumulate
        self.writes = False
        self.peers = Peers(None, plan.cluster.rank)

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
        state["least"] = least_batch(self.plan.config, self.facts, self.cluster.world_size)
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
        prepare_process(self.plan)
        self._join()
        data = build_data(self._of_batch(1))
        self.num_train, self.facts = data.num_train, data_facts(data)
        self.meter = self._meter()

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
        plan = self._of_batch(batch)
        data = build_data(plan)
        if plan.config["test"]:
            evaluate_largest(data)
        gc.collect()
        if self.cluster.world_size > 1 and device_of(plan).type == "cuda":
            let_go_of_what_was_sent(device_of(plan))
        meter = self.meter.fresh()
        with meter:
            module = build_module(plan.config, data_facts(data), has_checkpoint=bool(plan.checkpoint))
            prepare_net(module, plan)
            phases = MemoryPhases(meter)
            callbacks = [*_averaging(plan), phases]
            trainer = build_trainer(plan, build_strategy(plan), callbacks, [], self.files.folder)
            if isinstance(meter, TrackedBytes):
                with untracked(data, meter):
                    trainer.fit(module, datamodule=data)
            else:
                trainer.fit(module, datamodule=data)
        return phases.shares

    def _of_batch(self, batch: int) -> RunPlan:
        """The plan whose steps are those of the training, cut down to two.

        The second begins with the gradients of the first, and DDP lays out its buckets anew. Two accumulated
        batches hold as much as many.
        """
        own = Batch.of_device(batch, self.cluster.world_size, min(self.plan.batch.accumulate, 2))
        steps = 2 if 2 * own.global_size <= self.num_train else 1
        config = writable(self.plan.config)
        if mixes(config):  # adds nothing to a step's peak, and takes no odd batch
            config["augmentation"].update(mixup_alpha=0.0, cutmix_alpha=0.0)
        config["trainer"].update(
            two_steps(own.accumulate, steps), strategy=without_peers(self.plan.trainer["strategy"])
        )
        if self.plan.accelerator == "cpu":
            config["trainer"]["compile"] = False  # the tracker sees operations one by one
        return replace(self.plan, config=read_only(config), batch=own)

    def _meter(self) -> Any:
        own, device = self.plan.trainer, device_of(self.plan)
        fraction, stated = own.get("memory_fraction") or 1.0, own.get("memory_limit_gib")
        limit = int(stated * GIB) if stated else None
        if device.type == "cuda":
            return AllocatedBytes([each for each in devices_of(self.plan) if each.type == "cuda"], fraction, limit)
        if limit is None:
            limit = int(MEMORY_SHARE_OF_CPU * psutil.virtual_memory().available / self.cluster.devices)
            limit = min(self._gather(limit))
        return TrackedBytes(int(fraction * limit))

    def _join(self) -> None:
        """Meet the other ranks, and watch for the one that ends first."""
        if self.cluster.world_size == 1:
            return
        self.peers = Peers(join(self.cluster, device_of(self.plan), self.plan.trainer["timeout_s"]), self.cluster.rank)
        self.peers.watch()

    def _leave(self) -> int:
        """All ranks have written down what was found. Threads in the store's C++ would abort an orderly exit."""
        if self.cluster.world_size > 1:
            self._gather(None)
            leave_at_once(EXIT_OK)
        return EXIT_OK

    def _agree(self, state: State) -> State:
        """One history: a node whose ranks were ended early may have missed the last probe."""
        everyone = self._gather(state)
        longest = max(everyone, key=lambda own: len(own["probes"]))
        return copy.deepcopy(longest) | {"known": next((own["known"] for own in everyone if own["known"]), None)}

    def _keep(self, state: State) -> None:
        if self.writes:
            write_state(self.files, state)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.cluster.world_size == 1 else gather_objects(value)


def evaluate_largest(data: Any) -> None:
    """Validate on the test images where their batches are larger: small splits have batches of their own size."""
    if data.test_dataloader().batch_size > data.val_dataloader().batch_size:
        data.val_dataloader = data.test_dataloader


def _averaging(plan: RunPlan) -> list[Any]:
    """The moving average of the weights, which holds memory of its own."""
    decay = plan.trainer["ema_decay"]
    return [WeightAverage(decay, device_of(plan))] if decay else []


if __name__ == "__main__":
    sys.exit(main())

"""Decentralised training over the internet with hivemind (trainer=hivemind): peers join and leave at any time.

    python -m pip install -r requirements-hivemind.txt
    python src/train.py trainer=hivemind                                    # prints its address
    python src/train.py trainer=hivemind 'trainer.initial_peers=[<address>]'  # on another machine, now or later

All peers together fill one global batch, average their gradients, and step: with one peer it is plain training.
data.global_batch_size is the swarm's batch; trainer.accumulate_grad_batches cuts it into the pieces that peers add.
https://github.com/learning-at-home/hivemind
"""

import hashlib
import importlib.util
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lockstep.runs.errors import UserError
from lockstep.strategies.capabilities import Capabilities
from lockstep.strategies.sharded_state import State
from lockstep.strategies.swarm import (
    OwnOrder,
    children_end_with_this_process,
    clip_before_step,
    imported,
    initialise_state,
    start_dht,
)

log = logging.getLogger(__name__)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


class Hivemind(Capabilities, SingleDeviceStrategy):
    """One peer of a swarm.

    Args:
        initial_peers: addresses that other peers printed; none: this peer starts a swarm.
        swarm: name that all peers of one training share.
        host_maddrs: where this peer listens. Loopback unless told otherwise: nothing outside reaches it.
        announce_maddrs: addresses that others shall use, where they differ (behind a router).
        nat_port_map: ask the router to open a port.
        client_mode: open outgoing connections only, for peers behind a firewall.
        matchmaking_time_s: how long a round waits for peers to join it; 2 on a fast network, 15 over the internet.
        averaging_timeout_s: after this a round goes on without those that do not answer.
    Raises:
        UserError: hivemind is not installed.
    """

    no_ema = "peers that come late would average other weights"
    scales_losses = False  # peers cannot scale theirs together

    def __init__(
        self,
        device: torch.device | str | None = None,
        initial_peers: list[str] | None = None,
        swarm: str = "lockstep",
        host_maddrs: list[str] | None = None,
        announce_maddrs: list[str] | None = None,
        nat_port_map: bool = False,
        client_mode: bool = False,
        matchmaking_time_s: float = 5.0,
        averaging_timeout_s: float = 30.0,
    ) -> None:
        if importlib.util.find_spec("hivemind") is None:
            raise UserError(
                "trainer=hivemind needs the package hivemind, which is not installed: "
                "pip install -r requirements-hivemind.txt, or choose trainer=ddp_sim."
            )
        super().__init__(device=device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.network = {
            "initial_peers": initial_peers or [], "host_maddrs": host_maddrs or list(LOOPBACK),
            "announce_maddrs": announce_maddrs, "nat_port_map": nat_port_map, "client_mode": client_mode,
        }  # fmt: skip
        self.swarm_name = swarm
        self.matchmaking_time_s, self.averaging_timeout_s = matchmaking_time_s, averaging_timeout_s
        self.dht: Any = None
        self.swarm: Any = None
        self.peers_seen, self.swarm_steps = 1, 0

    def setup(self, trainer) -> None:
        if trainer.precision == "16-mixed":
            raise UserError("trainer=hivemind cannot scale losses over peers: trainer.precision=bf16-mixed or 32-true.")
        self.trainer = trainer
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._join()

    # --- joining and leaving

    def _join(self) -> None:
        hivemind = imported()
        data, trainer = self.trainer.datamodule, self.trainer
        self.micro_batch_size = data.per_device_batch_size
        self.total_steps = int(trainer.estimated_stepping_batches)
        [optimizer] = self.optimizers
        initialise_state(optimizer)
        if trainer.gradient_clip_val:
            clip_before_step(optimizer, trainer.gradient_clip_val)
        schedule = self.lr_scheduler_configs[0] if self.lr_scheduler_configs else None
        if schedule is not None:
            schedule.interval = "swarm step"  # hivemind steps it, Lightning never
        # Below the matchmaking time, or rounds can lock each other out.
        waits = {"request_timeout": min(3.0, 0.5 * self.matchmaking_time_s)}
        with children_end_with_this_process():
            self.dht = start_dht(**self.network)
            self.swarm = hivemind.Optimizer(
                dht=self.dht,
                run_id=self.swarm_name,
                optimizer=optimizer,
                scheduler=schedule.scheduler if schedule else None,
                target_batch_size=data.global_batch_size,
                batch_size_per_step=self.micro_batch_size,
                matchmaking_time=self.matchmaking_time_s,
                averaging_timeout=self.averaging_timeout_s,
                client_mode=self.network["client_mode"],
                delay_state_averaging=False,
                averager_opts=waits,
                grad_averager_factory=partial(hivemind.optim.grad_averager.GradientAverager, **waits),
                extra_tensors=[b for b in self.lightning_module.buffers() if b.is_floating_point()],
            )
        self._say_address()

    def _say_address(self) -> None:
        addresses = ",".join(str(address) for address in self.dht.get_visible_maddrs())
        log.info(f"swarm {self.swarm_name}: peers join with 'trainer.initial_peers=[{addresses}]'")

    def teardown(self) -> None:
        if self.swarm is not None:
            self.swarm_steps = self.swarm.local_epoch
            self.swarm.shutdown()  # says goodbye to the others
            self.dht.kill()  # its own shutdown reads what waits in its pipe first, from workers that are gone
            self.swarm = self.dht = None
        super().teardown()

    @property
    def steps(self) -> int:
        """That the whole swarm has made, before this peer came too."""
        return self.swarm.local_epoch if self.swarm else self.swarm_steps

    # --- training: each micro-batch is a contribution; hivemind steps once the swarm's batch is full

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Lightning divides each loss by the accumulation, hivemind weighs by images: see post_backward."""
        self._scale = self.trainer.accumulate_grad_batches

    def post_backward(self, closure_loss: Tensor) -> None:
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self._scale
        before = self.swarm.local_epoch
        self.swarm.step(batch_size=self.micro_batch_size)
        for parameter in self.lightning_module.parameters():
            parameter.grad = None
        if self.swarm.local_epoch != before:
            self._after_swarm_step()

    def _after_swarm_step(self) -> None:
        peers = max(1, int(self.swarm.tracker.global_progress.num_peers))
        if peers != self.peers_seen:
            log.info(f"swarm {self.swarm_name}: step {self.swarm.local_epoch}, {peers} peers")
            self.peers_seen = peers
        if self.swarm.local_epoch >= self.total_steps:
            self.trainer.should_stop = True

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Only the last micro-batch's forward and backward: the step itself is the swarm's."""
        return closure()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Each peer goes through the images in an order of its own."""
        if not hasattr(dataloader, "set_epoch"):
            return dataloader
        return OwnOrder(dataloader, self._order())

    def _order(self) -> int:
        seed = str(time.time_ns()) if self.dht is None else str(self.dht.peer_id)
        return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")

    # --- records and checkpoints: those of the plain net and optimizer

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        return {
            **super().optimizer_state(optimizer),
            "swarm_steps": self.swarm.local_epoch if self.swarm else self.swarm_steps,
        }

    def load_optimizer_state_dict(self, checkpoint: State) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.swarm is not None:
            self.swarm.state_averager.local_epoch = checkpoint["optimizer_states"][0].get("swarm_steps", 0)

    def record_fields(self) -> dict[str, Any]:
        """For run.json: steps of the whole swarm, and how many peers the last one had."""
        return {"swarm": {"name": self.swarm_name, "steps": self.steps, "peers": self.peers_seen}}

"""Decentralised training over the internet with hivemind (trainer=hivemind): peers join and leave at any time.

    python -m pip install -r requirements-hivemind.txt
    python src/train.py trainer=hivemind                                    # prints its address
    python src/train.py trainer=hivemind 'trainer.initial_peers=[<address>]'  # on another machine, now or later

All peers together fill one global batch, average their gradients, and step: with one peer it is plain training.
data.global_batch_size is the swarm's batch; trainer.accumulate_grad_batches cuts it into the pieces that peers add.
https://github.com/learning-at-home/hivemind
"""

import importlib.util
import logging
import os
import secrets
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lockstep.runs.environment import die_with_parent
from lockstep.runs.errors import UserError
from lockstep.strategies.base import Capabilities

log = logging.getLogger(__name__)

AVERAGING_TIMEOUT_S = 30.0  # after this a round goes on without those that do not answer


class Hivemind(Capabilities, SingleDeviceStrategy):
    """One peer of a swarm.

    Args:
        initial_peers: addresses that other peers printed; none: this peer starts a swarm.
        swarm: name that all peers of one training share.
        host_maddrs: where this peer listens; None: on loopback, where no other machine reaches it.
        client_mode: open outgoing connections only, for peers behind a firewall.
        matchmaking_time_s: how long a round waits for peers to join it; 2 on a fast network, 15 over the internet.
    Raises:
        UserError: hivemind is not installed.
    """

    no_ema = "peers that come late would average other weights"
    scales_losses = False  # peers cannot scale theirs together

    def __init__(
        self, device: torch.device | str | None = None, initial_peers: list[str] | None = None, swarm: str = "lockstep",
        host_maddrs: list[str] | None = None, client_mode: bool = False, matchmaking_time_s: float = 5.0,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("hivemind") is None:
            raise UserError(
                "trainer=hivemind needs the package hivemind, which is not installed: "
                "pip install -r requirements-hivemind.txt, or choose trainer=ddp_sim."
            )
        super().__init__(device=device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.initial_peers, self.host_maddrs = initial_peers or [], host_maddrs or ["/ip4/127.0.0.1/tcp/0"]
        self.swarm_name, self.client_mode, self.matchmaking_time_s = swarm, client_mode, matchmaking_time_s
        self.dht: Any = None
        self.swarm: Any = None
        self.peers_seen, self.swarm_steps = 1, 0

    def setup(self, trainer) -> None:
        if trainer.precision == "16-mixed":
            raise UserError("trainer=hivemind cannot scale losses over peers: trainer.precision=bf16-mixed or 32-true.")
        self.trainer = trainer
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            joining = [os.getpid()]
            os.register_at_fork(after_in_child=partial(_end_with_parent, joining))
            self._join()
            joining.clear()

    def _join(self) -> None:
        """Find the other peers and let hivemind's optimizer take the place of the run's."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit.script.*", FutureWarning)
            import hivemind
        logging.getLogger("hivemind").setLevel(logging.WARNING)
        trainer, [optimizer] = self.trainer, self.optimizers
        self.micro_batch_size = trainer.datamodule.per_device_batch_size
        self.total_steps = int(trainer.estimated_stepping_batches)
        initialise_state(optimizer)
        if trainer.gradient_clip_val:
            clip_before_step(optimizer, trainer.gradient_clip_val)
        schedule = self.lr_scheduler_configs[0] if self.lr_scheduler_configs else None
        if schedule is not None:
            schedule.interval = "swarm step"  # hivemind steps it, Lightning never
        try:
            self.dht = hivemind.DHT(
                start=True, initial_peers=self.initial_peers, host_maddrs=self.host_maddrs,
                client_mode=self.client_mode, use_relay=False, use_auto_relay=False, auto_nat=False,
            )  # fmt: skip
        except Exception as error:  # hivemind raises its daemon's own kinds
            raise UserError(
                f"No peer of trainer.initial_peers={self.initial_peers} could be joined "
                f"({str(error).splitlines()[0]}): give an address that a running peer printed."
            ) from error
        # Below the matchmaking time, or rounds can lock each other out.
        waits = {"request_timeout": min(3.0, 0.5 * self.matchmaking_time_s)}
        self.swarm = hivemind.Optimizer(
            dht=self.dht, run_id=self.swarm_name, optimizer=optimizer,
            scheduler=schedule.scheduler if schedule else None,
            target_batch_size=trainer.datamodule.global_batch_size, batch_size_per_step=self.micro_batch_size,
            matchmaking_time=self.matchmaking_time_s, averaging_timeout=AVERAGING_TIMEOUT_S,
            client_mode=self.client_mode, delay_state_averaging=False, averager_opts=waits,
            grad_averager_factory=partial(hivemind.optim.grad_averager.GradientAverager, **waits),
            extra_tensors=[b for b in self.lightning_module.buffers() if b.is_floating_point()],
        )  # fmt: skip
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
        """The steps of the whole swarm, those before this peer joined too."""
        return self.swarm.local_epoch if self.swarm else self.swarm_steps

    def post_backward(self, closure_loss: Tensor) -> None:
        """Contribute a micro-batch's gradients; hivemind steps once the swarm's batch is full.

        Lightning divides each loss by the accumulation, hivemind weighs by images.
        """
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.trainer.accumulate_grad_batches
        before = self.swarm.local_epoch
        self.swarm.step(batch_size=self.micro_batch_size)
        self.lightning_module.zero_grad()
        if self.swarm.local_epoch == before:
            return
        peers = max(1, int(self.swarm.tracker.global_progress.num_peers))
        if peers != self.peers_seen:
            log.info(f"swarm {self.swarm_name}: step {self.swarm.local_epoch}, {peers} peers")
            self.peers_seen = peers
        if self.swarm.local_epoch >= self.total_steps:
            self.trainer.should_stop = True

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run only the last micro-batch's forward and backward: the step itself is the swarm's."""
        return closure()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let each peer use its own order of images."""
        if hasattr(dataloader, "seed"):
            dataloader.seed = secrets.randbits(32)
        return dataloader

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {**super().optimizer_state(optimizer), "swarm_steps": self.steps}

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.swarm is not None:
            self.swarm.state_averager.local_epoch = checkpoint["optimizer_states"][0].get("swarm_steps", 0)

    def record_fields(self) -> dict[str, Any]:
        return {"swarm": {"name": self.swarm_name, "steps": self.steps, "peers": self.peers_seen}}


def _end_with_parent(joining: list[int]) -> None:
    """End when the parent does, in a process that is forked while `joining` names its parent."""
    if joining == [os.getppid()]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(joining[0])


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state tensors, which sharing needs, by a step that changes nothing.

    hivemind would do so by a step with the learning rate and weight decay of the run.
    """
    if optimizer.state:
        return
    before = [(parameter, parameter.detach().clone()) for parameter in _parameters(optimizer)]
    for parameter, value in before:
        parameter.grad = torch.zeros_like(value)
    optimizer.step()
    for parameter, value in before:
        parameter.data.copy_(value)
        parameter.grad = None
        for name, held in optimizer.state.get(parameter, {}).items():  # moments, and Adam's count of steps
            if isinstance(held, Tensor) or name == "step":
                optimizer.state[parameter][name] = held * 0


def clip_before_step(optimizer: torch.optim.Optimizer, largest_norm: float) -> None:
    """Clip the swarm's mean gradient, on which hivemind itself steps the optimizer."""

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:  # torch takes anything returned for new arguments
        torch.nn.utils.clip_grad_norm_(_parameters(stepping), largest_norm)

    optimizer.register_step_pre_hook(clip)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

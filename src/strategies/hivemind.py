"""Decentralised training over the internet (trainer=hivemind): peers join and leave at any time.

    python -m pip install -r requirements-hivemind.txt
    python src/train.py trainer=hivemind                                # prints its address
    python src/train.py trainer=hivemind 'trainer.initial_peers=[<address>]'   # another machine

All peers together fill one global batch, average their gradients, and step: with one peer it is
plain training. data.global_batch_size is the swarm's batch; trainer.accumulate_grad_batches cuts it
into the pieces that peers add. https://github.com/learning-at-home/hivemind
"""

import contextlib
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

from lockstep.process.environment import die_with_parent
from lockstep.process.errors import UserError
from lockstep.strategies.base import Capabilities, list_parameters

log = logging.getLogger(__name__)

# A round goes on without the peers that do not answer in this time.
AVERAGING_TIMEOUT_S = 30.0
# A process of this peer raises these if it talks to another process that has ended.
ENDED_PEER_ERRORS = (FileNotFoundError, ConnectionError, EOFError)


class Hivemind(Capabilities, SingleDeviceStrategy):
    """One peer of a swarm.

    Args:
        device: cpu, gpu or a device of torch; auto: a GPU if the machine has one.
        initial_peers: addresses that other peers printed; none: this peer starts a swarm.
        swarm: name that all peers of one training share.
        host_maddrs: where this peer listens; None: on loopback, where no other machine reaches it.
        client_mode: open outgoing connections only, for peers behind a firewall.
        matchmaking_time_s: how long a round waits for peers to join it; 2 on a fast network, 15
            over the internet.
    Raises:
        UserError: hivemind is not installed.
    """

    no_ema = "peers that come late would average other weights"
    # Peers cannot scale their losses together.
    scales_losses = False

    def __init__(
        self,
        device: torch.device | str = "auto",
        initial_peers: list[str] | None = None,
        swarm: str = "lockstep",
        host_maddrs: list[str] | None = None,
        client_mode: bool = False,
        matchmaking_time_s: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("hivemind") is None:
            raise UserError(
                "trainer=hivemind needs the package hivemind, which is not installed: "
                "pip install -r requirements-hivemind.txt, or choose trainer=ddp_sim."
            )
        super().__init__(device=choose_peer_device(device))
        self.initial_peers = initial_peers or []
        self.host_maddrs = host_maddrs or ["/ip4/127.0.0.1/tcp/0"]
        self.swarm_name = swarm
        self.client_mode = client_mode
        self.matchmaking_time_s = matchmaking_time_s
        self.dht: Any = None
        self.swarm: Any = None
        self.peers_seen = 1
        self.swarm_steps = 0

    def setup(self, trainer) -> None:
        if trainer.precision == "16-mixed":
            raise UserError(
                "trainer=hivemind cannot scale losses over peers: give "
                "trainer.precision=bf16-mixed or 32-true."
            )
        self.trainer = trainer
        self._refuse_options(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # hivemind's processes that start while this peer joins end with it.
            joining_pids = [os.getpid()]
            os.register_at_fork(after_in_child=partial(_end_with_parent, joining_pids))
            self._join()
            joining_pids.clear()

    def _refuse_options(self, trainer) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise UserError(
                f"trainer=hivemind makes the steps itself, and "
                f"{type(trainer.lightning_module).__name__} calls its optimizer: choose "
                "trainer=ddp_sim."
            )
        if trainer.gradient_clip_algorithm == "value":
            raise UserError(
                "trainer=hivemind clips the norm of the gradient: leave "
                "trainer.gradient_clip_algorithm out."
            )

    def _join(self) -> None:
        """Find the other peers and let hivemind's optimizer take the place of the run's."""
        [optimizer] = self.optimizers
        self.micro_batch_size = self.trainer.datamodule.per_device_batch_size
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        initialise_state(optimizer)
        if self.trainer.gradient_clip_val:
            clip_before_step(optimizer, self.trainer.gradient_clip_val)
        scheduler = None
        if self.lr_scheduler_configs:
            schedule = self.lr_scheduler_configs[0]
            if schedule.interval == "epoch":
                raise UserError(
                    "trainer=hivemind steps a schedule at each step of the swarm, and "
                    f"{type(schedule.scheduler).__name__} counts epochs: give scheduler=cosine, "
                    "step, wsd or none."
                )
            # hivemind steps the schedule, Lightning never does.
            schedule.interval = "swarm step"
            scheduler = schedule.scheduler
        self.dht = self._start_dht()
        self.swarm = self._start_optimizer(optimizer, scheduler)
        addresses = ",".join(str(address) for address in self.dht.get_visible_maddrs())
        log.info(f"swarm {self.swarm_name}: peers join with 'trainer.initial_peers=[{addresses}]'")

    def _start_dht(self) -> Any:
        """Connect to the other peers.

        Raises:
            UserError: none of trainer.initial_peers answers.
        """
        hivemind = import_hivemind()
        try:
            return make_quiet_dht(hivemind)(
                start=True,
                initial_peers=self.initial_peers,
                host_maddrs=self.host_maddrs,
                client_mode=self.client_mode,
                use_relay=False,
                use_auto_relay=False,
                auto_nat=False,
            )
        # hivemind raises its daemon's errors, which have no common class.
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"No peer of trainer.initial_peers={self.initial_peers} could be joined "
                f"({reason}): give an address that a running peer printed."
            ) from error

    def _start_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
        hivemind = import_hivemind()
        # Rounds can lock each other out if a request waits as long as the matchmaking.
        timeouts = {"request_timeout": min(3.0, 0.5 * self.matchmaking_time_s)}
        gradient_averager = hivemind.optim.grad_averager.GradientAverager
        buffers = self.lightning_module.buffers()
        return hivemind.Optimizer(
            dht=self.dht,
            run_id=self.swarm_name,
            optimizer=optimizer,
            scheduler=scheduler,
            target_batch_size=self.trainer.datamodule.global_batch_size,
            batch_size_per_step=self.micro_batch_size,
            matchmaking_time=self.matchmaking_time_s,
            averaging_timeout=AVERAGING_TIMEOUT_S,
            client_mode=self.client_mode,
            delay_state_averaging=False,
            averager_opts=timeouts,
            grad_averager_factory=partial(gradient_averager, **timeouts),
            extra_tensors=[buffer for buffer in buffers if buffer.is_floating_point()],
        )

    def teardown(self) -> None:
        if self.swarm is not None:
            self.swarm_steps = self.swarm.local_epoch
            # Tell the other peers that this one leaves.
            self.swarm.shutdown()
            # The DHT's shutdown would wait for answers of workers that have ended already.
            self.dht.kill()
            self.swarm = None
            self.dht = None
        super().teardown()

    @property
    def steps(self) -> int:
        """The steps of the whole swarm, with those before this peer joined."""
        if self.swarm is None:
            return self.swarm_steps
        return self.swarm.local_epoch

    def post_backward(self, closure_loss: Tensor) -> None:
        """Contribute a micro-batch's gradients; hivemind steps once the swarm's batch is full."""
        # Lightning divides each loss by the accumulation, hivemind weighs by images.
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.trainer.accumulate_grad_batches

        step_before = self.swarm.local_epoch
        self.swarm.step(batch_size=self.micro_batch_size)
        self.lightning_module.zero_grad()
        if self.swarm.local_epoch != step_before:
            self._report_step()

    def _report_step(self) -> None:
        """Log a change in the number of peers, and end the training after the last step."""
        peers = max(1, int(self.swarm.tracker.global_progress.num_peers))
        if peers != self.peers_seen:
            log.info(f"swarm {self.swarm_name}: step {self.swarm.local_epoch}, {peers} peers")
            self.peers_seen = peers
        if self.swarm.local_epoch >= self.total_steps:
            self.trainer.should_stop = True

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the last micro-batch's forward and backward; the step itself is the swarm's."""
        return closure()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give each peer another order of images."""
        if hasattr(dataloader, "seed"):
            dataloader.seed = secrets.randbits(32)
        return dataloader

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {**super().optimizer_state(optimizer), "swarm_steps": self.steps}

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.swarm is not None:
            state = checkpoint["optimizer_states"][0]
            self.swarm.state_averager.local_epoch = state.get("swarm_steps", 0)

    def record_fields(self) -> dict[str, Any]:
        swarm = {"name": self.swarm_name, "steps": self.steps, "peers": self.peers_seen}
        return {"swarm": swarm}


def choose_peer_device(name: torch.device | str) -> torch.device:
    """Return the device that trainer.accelerator names: cpu, gpu or auto."""
    if name == "auto":
        name = "gpu" if torch.cuda.is_available() else "cpu"
    if name == "gpu":
        name = "cuda:0"
    return torch.device(name)


def import_hivemind() -> Any:
    """Import hivemind without its warnings and log lines."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", FutureWarning)
        import hivemind
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    for name in ("hivemind.dht.dht", "asyncio"):
        logging.getLogger(name).addFilter(is_worth_telling)
    return hivemind


def make_quiet_dht(hivemind: Any) -> Any:
    """Return hivemind's DHT class, whose process prints no traceback at the end of this peer.

    An averager that ends while the DHT reads its last request makes it raise EOFError.
    """

    class QuietDHT(hivemind.DHT):  # type: ignore[misc]
        def run(self) -> None:
            with contextlib.suppress(EOFError):
                super().run()

    return QuietDHT


def is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for what hivemind logs about its processes and tasks that end before others.

    At the end of a good run its DHT answers an averager that is gone, and asyncio finds tasks that
    nobody has awaited.
    """
    if record.exc_info and isinstance(record.exc_info[1], ENDED_PEER_ERRORS):
        return False
    return not record.getMessage().startswith("Task was destroyed")


def _end_with_parent(joining_pids: list[int]) -> None:
    """End with the parent, in a process that is forked while `joining_pids` names the parent."""
    if joining_pids == [os.getppid()]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(joining_pids[0])


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state tensors, which sharing needs, by a step that changes nothing.

    hivemind would do so by a step with the learning rate and weight decay of the run.
    """
    if optimizer.state:
        return
    values = {parameter: parameter.detach().clone() for parameter in list_parameters(optimizer)}
    for parameter in values:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, value in values.items():
        parameter.data.copy_(value)
        parameter.grad = None
        _set_to_zero(optimizer.state.get(parameter, {}))


def _set_to_zero(state: dict[str, Any]) -> None:
    """Set moments, and Adam's count of steps, to zero."""
    for name, value in state.items():
        if isinstance(value, Tensor) or name == "step":
            state[name] = value * 0


def clip_before_step(optimizer: torch.optim.Optimizer, largest_norm: float) -> None:
    """Clip the swarm's mean gradient, on which hivemind itself steps the optimizer."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch takes anything that a hook returns for new arguments, so return nothing.
        torch.nn.utils.clip_grad_norm_(list_parameters(optimizer), largest_norm)

    optimizer.register_step_pre_hook(clip)

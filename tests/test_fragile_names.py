"""Names of the libraries that may change without notice: each test fails when its name does.

tests/test_house.py says which file of src/ uses which name.
"""

import argparse
import inspect
import socket
import sys

import lightning.pytorch as pl
import pytest
import timm
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from timm.models import vision_transformer
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from lockstep.checkpoints.resume_point import counter_state
from lockstep.config.compose import CONFIGS, register_resolvers
from lockstep.config.hydra_versions import version_base
from lockstep.config.schema import trainer_arguments


class Watch(pl.Callback):
    """Count the calls of what Lockstep wraps, and validate after each batch."""

    def __init__(self):
        self.calls = []

    def watch(self, owner, name):
        original = getattr(owner, name)

        def wrapped(*arguments, **options):
            self.calls.append(name)
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    def setup(self, trainer, pl_module, stage):
        epoch_loop = trainer.fit_loop.epoch_loop
        self.watch(trainer.strategy, "process_dataloader")
        self.watch(epoch_loop, "on_run_start")
        self.watch(epoch_loop.val_loop, "run")
        trainer.callbacks = [AddedInSetup(self.calls), *trainer.callbacks]

    def on_train_start(self, trainer, pl_module):
        trainer.val_check_batch = 1


class AddedInSetup(pl.Callback):
    def __init__(self, calls):
        self.calls = calls

    def on_train_start(self, *_):
        self.calls.append("added")


@pytest.fixture(scope="module")
def fitted():
    """Return a plain trainer after two batches, and the calls of its callback."""
    watch = Watch()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return trainer, watch.calls


PLAIN = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


@PLAIN
def test_the_loop_state_has_the_keys_that_a_resume_writes(fitted):
    trainer, _ = fitted
    state = trainer.fit_loop.state_dict()
    counters = {*counter_state(0, 0, 0), "is_last_batch"}
    assert state["epoch_loop.batch_progress"].keys() == counters
    assert state["epoch_loop.val_loop.batch_progress"].keys() == counters
    assert state["epoch_progress"] == counter_state(1, 1, 1)

    batch_progress = trainer.fit_loop.epoch_loop.batch_progress
    assert batch_progress.total.ready == batch_progress.current.ready == 2
    assert batch_progress.is_last_batch


@PLAIN
def test_lightning_calls_what_the_loader_state_wraps(fitted):
    trainer, calls = fitted
    assert {"process_dataloader", "on_run_start"} <= set(calls)
    assert trainer.fit_loop.is_resuming is False
    assert trainer.fit_loop.epoch_loop.restarting is False


@PLAIN
def test_the_loops_have_the_methods_that_are_called(fitted):
    fit_loop = fitted[0].fit_loop
    for method in (
        fit_loop.setup_data,
        fit_loop.on_iteration_done,
        fit_loop.epoch_loop.val_loop.setup_data,
    ):
        assert not inspect.signature(method).parameters


@PLAIN
def test_validations_follow_an_interval_set_when_training_starts(fitted):
    assert fitted[1].count("run") == 2


@PLAIN
def test_a_callback_added_in_setup_is_called(fitted):
    assert fitted[1].count("added") == 1


def test_the_trainers_arguments_are_those_of_its_source():
    parameters = inspect.signature(pl.Trainer.__init__).parameters
    assert {*trainer_arguments()} == parameters.keys() - {"self"}


def test_the_agent_takes_its_signals_and_its_grace(tmp_path):
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        logs_specs=DefaultLogsSpecs(str(tmp_path)),
        signals_to_handle="SIGQUIT",
        shutdown_timeout=7,
    )
    assert (config.signals_to_handle, config.shutdown_timeout) == ("SIGQUIT", 7)
    files = config.logs_specs.reify({0: {"TORCHELASTIC_RESTART_COUNT": "0"}})
    assert files.error_files[0].endswith("/error.json")


def test_a_store_serves_at_the_socket_that_it_gets():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store.append("ranks", "0 ")
    store.append("ranks", "1 ")
    assert TCPStore("127.0.0.1", port, is_master=False).get("ranks") == b"0 1 "


def test_a_stance_turns_compilation_off_and_on():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    torch.compiler.set_stance("force_eager")
    try:
        assert double(torch.ones(1)) == 2 and not compiled
    finally:
        torch.compiler.set_stance("default")
    assert double(torch.ones(1)) == 2 and compiled


def test_hydras_node_has_the_overrides_and_the_chosen_options():
    from hydra import compose, initialize_config_dir

    register_resolvers()
    overrides = ["model=vit", "hydra.searchpath=[]", "seed=3"]
    with initialize_config_dir(str(CONFIGS), **version_base()):
        node = compose("train", overrides, return_hydra_config=True).hydra
    assert node.overrides.task == ["model=vit", "seed=3"]
    assert node.overrides.hydra == ["hydra.searchpath=[]"]
    assert node.runtime.choices["model"] == "vit"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="older Pythons check no help texts")
def test_argparse_checks_help_texts_by_the_name_that_is_replaced():
    assert callable(getattr(argparse.ArgumentParser, "_check_help"))  # noqa: B009


def test_timms_vision_transformer_has_the_parts_before_its_blocks():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32)
    tokens = vit.norm_pre(
        vit.patch_drop(vit._pos_embed(vit.patch_embed(torch.zeros(1, 3, 32, 32))))
    )
    assert tokens.shape == (1, 5, 192)


def test_timm_filters_a_state_dict_by_the_model():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32)
    state = {"module.head.bias": torch.zeros(1000), "pos_embed": torch.zeros(1, 197, 192)}
    adapted = vision_transformer.checkpoint_filter_fn(state, vit)
    assert adapted["pos_embed"].shape == vit.pos_embed.shape

"""A rehearsal names file and line of what users get wrong, and says nothing of what is right.

Each defect is a module of a user's own; the line that the rehearsal has to name ends with `# HERE`.
"""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rehearse
from lockstep.config.compose import chosen_options, compose, plain
from lockstep.rehearsal import starts
from lockstep.rehearsal.faults import Fault, fault_in
from lockstep.rehearsal.rehearse import lines
from lockstep.rehearsal.report import Line
from lockstep.rehearsal.words import rehearsal_of
from lockstep.runs.config import read_only
from lockstep.runs.errors import EXIT_USER_ERROR, UserError
from null_gpus import needs_null_gpus, run_on_null_gpus

SMALL = ("experiment=quickstart", "data.global_batch_size=16", "callbacks.hardware=null")
ONE, TWO = ("trainer=gpu", "hardware=g5.xlarge"), ("trainer=ddp", "trainer.devices=2", "hardware=g5.12xlarge")
NET = ("model._target_=own.Net",)
LOSS = ("loss._target_=own.Loss",)
STEP = ("classifier._target_=own.Classifier",)
CALLBACK = ("+callbacks.own._target_=own.Watcher",)
METRIC = ("+metrics.own._target_=own.Share",)

OWN = """
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import Callback
    from torch import nn
    from torchmetrics import Metric

    from classifier import ImageClassifier

    class Net(nn.Module):
        def __init__(self, num_classes, channels=1, **_):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, padding=1)
            self.head = nn.Linear(8, num_classes)
            self.mean = torch.zeros(8)
            self.calls, self.kept = 0, []
            {init}

        def forward(self, x):
            self.calls += 1
            h = self.conv(x).relu().mean((2, 3))
            {forward}
            return self.head(h)

    class Loss(nn.Module):
        def __init__(self, **_):
            super().__init__()

        def forward(self, logits, labels):
            {loss}
            return nn.functional.cross_entropy(logits, labels)

    class Classifier(ImageClassifier):
        def training_step(self, batch, batch_idx):
            images, labels = batch
            {step}
            return super().training_step((images, labels), batch_idx)

        def validation_step(self, batch, batch_idx):
            images, labels = batch
            {validation}
            return super().validation_step((images, labels), batch_idx)

        def test_step(self, batch, batch_idx):
            {test}
            return super().validation_step(batch, batch_idx)

        def on_load_checkpoint(self, checkpoint):
            {load}
            super().on_load_checkpoint(checkpoint)

    class Watcher(Callback):
        def __init__(self):
            self.kept = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            {callback}

    class Share(Metric):
        def __init__(self, num_classes=10, **options):
            super().__init__(**options)
            self.add_state("hits", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, logits, labels):
            {metric}
            self.hits += (logits.argmax(1) == labels).sum()

        def compute(self):
            return self.hits
"""
PARTS = ("init", "forward", "loss", "step", "validation", "test", "load", "callback", "metric")

DEFECTS = {  # name: (words, the part of OWN, its code)
    "a tensor made on the CPU in forward": (ONE, NET, "forward", "h = h + torch.ones(8)  # HERE"),
    "a tensor that is no buffer": (ONE, NET, "forward", "h = h - self.mean  # HERE"),
    "an index on the CPU": (ONE, NET, "forward", "h = h.gather(1, torch.zeros(len(h), 8, dtype=torch.long))  # HERE"),
    "a mask of another shape": (ONE, NET, "forward", "h = h * torch.ones(len(h), 7, device=h.device)  # HERE"),
    "a layer of another width": (ONE, NET, "forward", "h = nn.functional.linear(h, h.new_ones(8, 9))  # HERE"),
    "view of what is not contiguous": (ONE, NET, "forward", "h = h.t().view(-1)  # HERE"),
    "a float64 weight": (ONE, NET, "forward", "h = h.double() @ torch.ones(8, 8, device=h.device)  # HERE"),
    "a dtype that autocast does not see": (
        ONE, NET, "forward", "h = torch.einsum('bi,ij->bj', h.half(), h.new_ones(8, 8).double()).float()  # HERE",
    ),
    "numpy of a device's tensor": (ONE, NET, "forward", "h.detach().numpy()  # HERE"),
    "item in forward": (ONE, NET, "forward", "h.sum().item()  # HERE"),
    "a branch on a value": (ONE, NET, "forward", "h = h if h.sum() > 0 else h + 1  # HERE"),
    "nonzero in forward": (ONE, NET, "forward", "h[h.sum(1) > 0].sum()  # HERE"),
    "a copy to the CPU": (ONE, NET, "forward", "h.detach().cpu()  # HERE"),
    "a copy to the GPU": (ONE, NET, "forward", "h = h + torch.ones(8).to(h.device)  # HERE"),
    "a synchronisation": (ONE, NET, "forward", "float(h.detach().max())  # HERE"),
    "rank 1's device by number": (TWO, NET, "forward", "h = h + torch.ones(8, device='cuda:0')  # HERE"),
    "a device that is not there": (ONE, NET, "forward", "h = h.to('cuda:3')  # HERE"),
    "an unused parameter": (TWO, NET, "init", "self.extra = nn.Linear(4, 4)  # HERE"),
    "an unused parameter on one device": (ONE, NET, "init", "self.scale = nn.Parameter(torch.ones(4))  # HERE"),
    "a constructor that fails": (ONE, NET, "init", "self.more = nn.Linear(4, '4')  # HERE"),
    "a tensor on the GPU while it is built": (ONE, NET, "init", "self.bias = torch.ones(8).cuda() + self.mean  # HERE"),
    "a collective on one rank only": (
        TWO, NET, "forward", "dist.get_rank() or dist.all_reduce(torch.ones(3, device=h.device))  # HERE",
    ),
    "a collective of two shapes": (
        TWO, NET, "forward", "dist.all_reduce(torch.ones(3 + dist.get_rank(), device=h.device))  # HERE",
    ),
    "another collective on each rank": (
        TWO, NET, "forward",
        "(dist.all_reduce if dist.get_rank() else lambda t: dist.broadcast(t, 0))(h.new_ones(3))  # HERE",
    ),
    "a collective into CPU tensors": (
        TWO, NET, "forward", "dist.all_gather([torch.zeros(h.shape)] * 2, h.detach())  # HERE",
    ),
    "labels that are too large": (ONE, LOSS, "loss", "nn.functional.nll_loss(logits, labels + 10)  # HERE"),
    "weights of classes on the CPU": (
        ONE, LOSS, "loss", "nn.functional.cross_entropy(logits, labels, weight=torch.ones(10))  # HERE",
    ),
    "item in the loss": (ONE, LOSS, "loss", "assert logits.isfinite().all()  # HERE"),
    "one-hot labels of the wrong dtype": (
        ONE, LOSS, "loss", "nn.functional.cross_entropy(logits, nn.functional.one_hot(labels, 10))  # HERE",
    ),
    "item in a step": (ONE, STEP, "step", "images.mean().item()  # HERE"),
    "tolist in a step": (ONE, STEP, "step", "labels.tolist()  # HERE"),
    "unique in a step": (ONE, STEP, "step", "labels.unique()  # HERE"),
    "images that a step moves away": (ONE, STEP, "step", "images = self.net.head(images.cpu())  # HERE"),
    "a step without gradients": (ONE, STEP, "step", "self.net(images).detach().sum().backward()  # HERE"),
    "a tensor made in validation": (ONE, STEP, "validation", "images = images + torch.ones(8)  # HERE"),
    "a shape in the test": (ONE, STEP, "test", "batch[0].view(7, -1, 3)  # HERE"),
    "a key that the checkpoint has not": (ONE, STEP, "load", "checkpoint['average']  # HERE"),
    "item in a callback": (ONE, CALLBACK, "callback", "outputs['loss'].item()  # HERE"),
    "features of every step kept": (ONE, NET, "forward", "self.kept.append(h)  # HERE"),
    "losses of every step kept": (ONE, CALLBACK, "callback", "self.kept += [outputs['loss']]  # HERE"),
    "a callback that fails": (ONE, CALLBACK, "callback", "outputs['losses']  # HERE"),
    "a metric on the CPU": (ONE, METRIC, "metric", "logits + torch.ones(10)  # HERE"),
}  # fmt: skip
QUICK = ("a tensor made on the CPU in forward",)


def write_own(folder, part: str | None = None, code: str = "pass") -> str:
    """own.py with the code in its part; where the marked line is, as file:line."""
    parts = {name: "pass" for name in PARTS} | ({part: code} if part else {})
    text = textwrap.dedent(OWN).format(**parts)
    path = folder / "own.py"
    path.write_text(text)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# HERE")]
    return f"{path}:{lines[0]}" if lines else str(path)


def report(*words: str, folder) -> Iterator[Line]:
    """The lines of a rehearsal whose starts are forked from the server of null GPUs."""

    def forked(words: list[str], variables: dict[str, str], output) -> int:
        before = functools.partial(
            exec, f"import site, warnings\nwarnings.resetwarnings()\nsite.addsitedir({str(folder)!r})"
        )
        logs = next(Path(word.partition("=")[2]) for word in words if word.startswith("paths.log_dir="))
        done = run_on_null_gpus("train", *words, logs=logs, environment=variables, before=before)
        output.write_text(done.output)
        return done.code

    cfg = compose("train", list(words))
    rehearsal = rehearsal_of(read_only(plain(cfg)), chosen_options(cfg), list(words))
    return iter(lines(rehearsal, {}, folder / "rehearsal", 0.3, 1.0, forked))


@needs_null_gpus
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in DEFECTS])
def test_it_names_the_line_of_a_defect(name, tmp_path):
    machine, place, part, code = DEFECTS[name]
    where, said = write_own(tmp_path, part, code), []
    for line in report(*SMALL, *machine, *place, folder=tmp_path):
        said.append(str(line))
        if line.held is False and where in line.text:
            return
    raise AssertionError("\n".join([where, *said]))


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.parametrize("machine", [ONE, TWO, (*TWO, "trainer=fsdp")])
def test_no_alarm_at_what_is_right(machine, tmp_path):
    chosen = {word.partition("=")[0]: word for word in machine}
    write_own(tmp_path)
    said = list(report(*SMALL, *chosen.values(), folder=tmp_path))
    assert [line.text for line in said if line.held is False] == []
    assert len([line for line in said if line.held]) == 6


@needs_null_gpus
@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_named(tmp_path):
    words = ("model=vit_tiny_32", "data=synthetic", "data.global_batch_size=2048", "hardware.gpu_memory_gib=1", *ONE)
    said = [line.text for line in report(*words, folder=tmp_path) if line.held is False]
    assert said and "OutOfMemoryError" in said[0]


def test_what_an_experiment_keeps_is_not_kept_of_a_rehearsal(tmp_path):
    words = ["experiment=vit_fsdp", *ONE]
    cfg = compose("train", words)
    assert cfg.logbook == "keep"
    command = rehearsal_of(read_only(plain(cfg)), chosen_options(cfg), words).command(str(tmp_path), 2, 2)
    again = compose("train", command)
    assert again.logbook is None and again.paths.logbook_dir == f"{tmp_path}/logbook"


@pytest.mark.parametrize(("trainer", "devices"), [("gpu", 1), ("dp", 4), ("model_parallel", 4), ("ddp", 4)])
def test_as_many_devices_as_the_trainer_takes_of_the_machine(trainer, devices):
    words = ["experiment=quickstart", f"trainer={trainer}", "hardware=g5.12xlarge"]
    cfg = compose("train", words)
    assert rehearsal_of(read_only(plain(cfg)), chosen_options(cfg), words).devices == devices


def test_the_script_says_what_it_refuses(tmp_path, capfd):
    refused = {
        "trainer=gpu": "A rehearsal needs a machine with GPUs: hardware= one of",
        "hardware=p4d.24xlarge trainer=cpu": "trainer=cpu has nothing to rehearse on GPUs",
        "hardware=p3.2xlarge trainer=gpu": "no kernels for capability 7.0",
        "hardware=p4d.24xlarge trainer=ddp data.global_batch_size=12": "does not divide into 8 ranks",
        "hardware=p4d.24xlarge trainer=gpu resume=r": "leave resume= out",
        "hardware=p4d.24xlarge trainer=gpu --mfu=2": "give --mfu a number above 0, at most 1",
    }
    for words, sentence in refused.items():
        assert rehearse.main(words.split()) == EXIT_USER_ERROR
        assert sentence in "".join(capfd.readouterr()), words


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_its_processes(number, tmp_path):
    command = [sys.executable, rehearse.__file__, "experiment=quickstart", *TWO]
    script = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE)

    def processes() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline", "environ"])
        return [p for p in every if str(tmp_path) in str(p.info) and p.pid != script.pid]

    while len(processes()) < 3:  # the supervisor and its ranks
        assert script.poll() is None
        time.sleep(0.2)
    script.send_signal(number)
    said = script.communicate(timeout=20)[1].decode()
    psutil.wait_procs(processes(), 5)
    assert processes() == []
    if number == signal.SIGTERM:
        assert script.returncode == 128 + number and "stopped by SIGTERM" in said
        assert list(tmp_path.glob("rehearsal-*")) == []


def test_elsewhere_it_says_what_is_missing(monkeypatch):
    answer = subprocess.CompletedProcess([], 0, '{"missing": "null GPUs need cc: apt-get install gcc binutils"}', "")
    monkeypatch.setattr(starts.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(UserError, match="No rehearsal here: null GPUs need cc: apt-get install gcc binutils."):
        starts.variables_of_null_gpus()


def test_the_fault_is_that_of_the_innermost_line_of_the_users():
    text = """Traceback (most recent call last):
  File "/home/me/net.py", line 7, in forward
    h + 1
  File "/usr/lib/python3.11/site-packages/torch/nn/module.py", line 9, in call
    raise
RuntimeError: no
error: rank 0 in training
"""
    assert fault_in({0: "", 1: text}) == Fault("RuntimeError: no", "/home/me/net.py:7", 1)
    assert fault_in({0: "all well"}) is None

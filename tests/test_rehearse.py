"""A dry run names file and line of common mistakes, and prints no failure for sound code.

Each defect is a module of a user's own; the line that the dry run has to name ends with `# HERE`.
"""

import functools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import nullgpu
import rehearse
from lockstep.config.compose import compose, plain
from lockstep.process.errors import UserError
from null_gpus import needs_null_gpus, run_on_null_gpus

SMALL = ("experiment=quickstart", "data.global_batch_size=16", "callbacks.hardware=null")
ONE, TWO = ("trainer=gpu",), ("trainer=ddp", "trainer.devices=2")
NET = ("model._target_=own.Net",)
STEP = ("task._target_=own.Classifier",)

OWN = """
    import torch
    import torch.distributed as dist
    from torch import nn

    from tasks.classifier import ImageClassifier

    class Net(nn.Module):
        def __init__(self, num_classes, **_):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, padding=1)
            self.head = nn.Linear(8, num_classes)
            {init}

        def forward(self, x):
            h = self.conv(x).relu().mean((2, 3))
            {forward}
            return self.head(h)

    class Classifier(ImageClassifier):
        def training_step(self, batch, batch_idx):
            images, labels = batch
            {step}
            return super().training_step((images, labels), batch_idx)
"""

DEFECTS = {  # name: (words, the part of OWN, its code)
    "a tensor made on the CPU in forward": (ONE, NET, "forward", "h = h + torch.ones(8)  # HERE"),
    "a synchronisation": (ONE, NET, "forward", "float(h.detach().max())  # HERE"),
    "rank 1's device by number": (TWO, NET, "forward", "h = h + torch.ones(8, device='cuda:0')  # HERE"),
    "an unused parameter": (TWO, NET, "init", "self.extra = nn.Linear(4, 4)  # HERE"),
    "a collective on one rank only": (
        TWO, NET, "forward", "dist.get_rank() or dist.all_reduce(torch.ones(3, device=h.device))  # HERE",
    ),
    "item in a step": (ONE, STEP, "step", "images.mean().item()  # HERE"),
}  # fmt: skip


def write_own(folder, **parts: str) -> str:
    """own.py with the code of its parts; where the marked line is, as file:line."""
    text = textwrap.dedent(OWN).format(
        **{"init": "pass", "forward": "pass", "step": "pass", **parts}
    )
    (folder / "own.py").write_text(text)
    before = text.partition("# HERE")[0]
    return f"{folder / 'own.py'}:{before.count(chr(10)) + 1}"


def report(*words: str, folder: Path, capability: str = "8.0") -> Iterator[tuple[str, str]]:
    """The lines of a dry run whose training runs are forked from the server of simulated GPUs."""

    def forked(words, variables, output):
        before = functools.partial(
            exec,
            f"import site, warnings\nwarnings.resetwarnings()\nsite.addsitedir({str(folder)!r})",
        )
        logs = next(
            Path(word.partition("=")[2]) for word in words if word.startswith("paths.log_dir=")
        )
        own = {
            name: value
            for name, value in variables.items()
            if name.startswith(("NULLGPU_", "TORCH_NCCL_"))
        }
        done = run_on_null_gpus("train", *words, logs=logs, environment=own, before=before)
        output.write_text(done.output)
        return done.code

    cfg = compose("train", list(words))
    (folder / "dry").mkdir()
    return rehearse.rehearse_training(plain(cfg), list(words), capability, folder / "dry", forked)


def test_a_fault_beside_an_allowed_unused_parameter_is_named(tmp_path):
    """The run is played: its validation failed, and its net has a head that it does not use."""

    def run(words, variables, output):
        frame = '  File "/x/own.py", line 7, in validation_step\n    raise ValueError("no")\n'
        output.write_text(f"Traceback (most recent call last):\n{frame}ValueError: no\n")
        (output.parent / "unused.json").write_text(json.dumps({"aux.weight": "own.py:3"}))
        return 1

    words = [*SMALL, *TWO, "+trainer.strategy.find_unused_parameters=true"]
    config = plain(compose("train", words))
    driver = SimpleNamespace(environment=lambda *_, **options: {})
    rehearsal = rehearse.Rehearsal(config, words, "8.0", run, driver, 2, 1)
    unused, fault = rehearse._train_few_images(rehearsal, tmp_path / "few")
    assert unused == rehearse.Line("", "no gradient for aux.weight: own.py:3")
    assert fault.mark == "FAILED" and "/x/own.py:7 · rank 0 · ValueError: no" in fault.text


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_it_names_the_line_of_a_defect(name, tmp_path):
    machine, place, part, code = DEFECTS[name]
    where, said = write_own(tmp_path, **{part: code}), []
    for word, text in report(*SMALL, *machine, *place, folder=tmp_path):
        said.append(f"{word} {text}")
        if word == "FAILED" and where in text:
            return
    raise AssertionError("\n".join([where, *said]))


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "capability"), [(ONE, "7.5"), ((*TWO[1:], "trainer=fsdp"), "8.0")]
)
def test_sound_code_fails_nowhere_in_bf16_and_in_fp16(words, capability, tmp_path):
    write_own(tmp_path)
    said = list(report(*SMALL, *words, folder=tmp_path, capability=capability))
    assert [text for word, text in said if word == "FAILED"] == [] and len(
        [1 for word, _ in said if word == "ok"]
    ) == 2
    assert any("GradScaler" in text for _, text in said) == (capability == "7.5")


@needs_null_gpus
@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_named(tmp_path):
    words = (
        "model=vit_tiny_32",
        "data=synthetic",
        "data.global_batch_size=2048",
        "trainer.memory_limit_gib=1",
        *ONE,
    )
    [said] = [text for word, text in report(*words, folder=tmp_path) if word == "FAILED"]
    assert "OutOfMemoryError" in said


def test_what_it_refuses(monkeypatch, capfd):
    for words, sentence in {
        "trainer=cpu": "This trainer uses no GPU: pass trainer=gpu, ddp or fsdp.",
        "trainer=gpu data.global_batch_size=max": "pass the number that find_batch_size.py --estimate prints",
        "trainer=ddp trainer.devices=6 data.global_batch_size=512": "does not divide into 6 ranks",
        "trainer=gpu --capabilty=7.5": "--capabilty=7.5",
    }.items():
        assert rehearse.main(["experiment=quickstart", *words.split()]) == 2
        assert nullgpu.missing() or sentence in "".join(capfd.readouterr()), words
    monkeypatch.setattr(
        nullgpu, "missing", lambda: "nullgpu needs cc: apt-get install gcc binutils"
    )
    with pytest.raises(
        UserError, match="No dry run here: nullgpu needs cc: apt-get install gcc binutils."
    ):
        next(rehearse.rehearse_training({}, [], "8.0", Path(), lambda *_: 0))


@needs_null_gpus
@pytest.mark.slow
def test_a_capability_without_kernels_names_the_build_to_install(tmp_path):
    with pytest.raises(UserError, match=r"no kernels for .*7\.0.* make install DEVICE=cu126"):
        list(report(*SMALL, *ONE, folder=tmp_path, capability="7.0"))

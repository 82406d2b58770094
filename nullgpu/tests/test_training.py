"""Lockstep on simulated GPUs: the losses of one CPU process, no synchronisation in a step, faults
by name.
"""

import json
import subprocess
import sys
from collections import Counter

import pytest

from null_gpus import REPOSITORY, needs_null_gpus, nodes_on_null_gpus, null_gpus, run_on_null_gpus
from ranks import free_port
from runs import run_script

pytestmark = needs_null_gpus
SMALL = ("model=vit_tiny_32", "model.depth=2", "model.embed_dim=48", "data=synthetic", "data.num_images=160",
         "data.num_test_images=40", "data.image_size=16", "data.global_batch_size=32",
         "trainer.max_epochs=1")  # fmt: skip
FLOAT32 = "trainer.precision=32-true"
TOLERANCE = 1e-4  # float32, summed in another order
TRAINERS = {
    "gpu": 1, "ddp": 2, "fsdp": 2, "allreduce": 2, "dp": 2, "model_parallel": 2, "fsdp trainer.devices=8": 8,
    "ddp trainer.accumulate_grad_batches=2 trainer.channels_last=true": 2,
    "fsdp trainer.activation_checkpointing=true": 2,
    "ddp_model_parallel": 4, "ddp_model_parallel trainer.accumulate_grad_batches=2 trainer.micro_batches=2": 4,
}  # fmt: skip
ROUGH = {"bf16-mixed": 0.02, "16-mixed": 0.01, "bf16-true": 0.05, "64-true": TOLERANCE}


def losses(record):
    return [record["metrics"][name] for name in ("val/loss", "test/loss")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    done = run_script("train", *SMALL, FLOAT32, "trainer=cpu", logs=tmp_path_factory.mktemp("cpu"))
    assert done.code == 0, done.output
    return losses(done.record)


def trained(words, devices, logs, **options):
    done = run_on_null_gpus(
        "train", *SMALL, *f"trainer={words}".split(), logs=logs, devices=devices, **options
    )
    assert done.code == 0 and "nullgpu:" not in done.output, done.output
    return done


@pytest.mark.parametrize("words", TRAINERS)
def test_losses_are_those_of_one_cpu_process(words, on_cpu, tmp_path):
    done = trained(f"{words} {FLOAT32}", TRAINERS[words], tmp_path)
    assert losses(done.record) == pytest.approx(on_cpu, rel=TOLERANCE)


def test_ranks_in_stages_sample_all_gpus_of_their_node(tmp_path):
    done = trained(f"ddp_model_parallel {FLOAT32}", 4, tmp_path)
    [node] = done.record["hardware"]["nodes"]
    assert done.record["world_size"] == 2
    assert {f"gpu{gpu}/memory_gib" for gpu in range(4)} <= set(node["stats"])


@pytest.mark.parametrize(("trainer", "devices"), [("model_parallel", 2), ("ddp_model_parallel", 4)])
def test_adagrad_keeps_its_sums_beside_the_parameters_of_each_stage(trainer, devices, tmp_path):
    words = f"{trainer} {FLOAT32} optimizer=sgd optimizer._target_=torch.optim.Adagrad"
    words += " ~optimizer.momentum ~optimizer.nesterov"
    done = trained(f"{words} run_id=r", devices, tmp_path)
    assert done.record["epochs"] == 1
    again = ["resume=r", "trainer.max_epochs=2"]
    resumed = run_on_null_gpus("train", *again, logs=tmp_path, devices=devices)
    assert resumed.code == 0 and resumed.record["epochs"] == 2, resumed.output


@pytest.mark.parametrize(
    ("trainer", "precision"),
    [
        ("gpu", "16-mixed"),
        ("ddp", "bf16-mixed"),
        ("fsdp", "bf16-mixed"),
        ("fsdp", "bf16-true"),
        ("gpu", "64-true"),
    ],
)
def test_every_precision(trainer, precision, on_cpu, tmp_path):
    done = trained(f"{trainer} trainer.precision={precision}", TRAINERS[trainer], tmp_path)
    assert losses(done.record) == pytest.approx(on_cpu, rel=ROUGH[precision])


@pytest.mark.parametrize("trainer", ["ddp", "fsdp trainer.shard_within_node=true"])
def test_two_nodes_of_two_have_the_losses_of_one(trainer, on_cpu, tmp_path):
    first, second = nodes_on_null_gpus(
        *SMALL, FLOAT32, *f"trainer={trainer}".split(), logs=tmp_path
    )
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.record["world_size"] == 4 and losses(first.record) == pytest.approx(
        on_cpu, rel=TOLERANCE
    )
    assert all("gpu1/memory_gib" in node["stats"] for node in first.record["hardware"]["nodes"])


def test_another_trainer_resumes_a_run_and_any_evaluates_it(tmp_path):
    trained(f"fsdp {FLOAT32} run_id=r", 2, tmp_path)
    again = ["resume=r", "trainer=gpu", "trainer.max_epochs=2", FLOAT32]
    second = run_on_null_gpus("train", *again, logs=tmp_path, devices=2)
    assert second.code == 0 and second.record["epochs"] == 2, second.output
    for reader in ("fsdp", "cpu"):
        done = run_on_null_gpus(
            "eval", "ckpt_path=r", f"trainer={reader}", FLOAT32, logs=tmp_path, devices=2
        )
        assert done.code == 0, done.output
        assert done.record["metrics"]["test/correct"] == second.record["metrics"]["test/correct"]


@pytest.mark.parametrize(
    ("words", "devices"),
    [("fsdp", 2), ("ddp trainer.accumulate_grad_batches=2 trainer.gradient_clip_val=1.0 trainer.ema_decay=0.9", 2),
     ("gpu trainer.precision=16-mixed", 1)],
)  # fmt: skip
def test_only_the_scaler_of_fp16_synchronises_in_every_step(words, devices, tmp_path):
    def by_line(steps):
        logs = tmp_path / str(steps)
        own = f"{words} trainer.log_every_n_steps=1000 data.num_images=600 trainer.limit_train_batches={2 * steps}"
        own += " data.global_batch_size=16 trainer.max_steps=" + str(2 * steps)
        trained(
            own, devices, logs, syncs=logs / "syncs", capability="7.5" if "=16-" in words else "8.0"
        )
        counts = Counter()
        for path in sorted((logs / "syncs").glob("rank*.json")):
            counts.update(json.loads(path.read_text()))
        return counts

    few, many = by_line(2), by_line(4)
    assert few, "the validation reads its counts"
    assert [line for line in many - few if not line.startswith("GradScaler")] == []


@pytest.mark.parametrize(
    ("how", "said"),
    [("runs_out_of_memory", "CUDA out of memory"), ("NULLGPU_LOST", "unspecified launch failure")],
)
def test_the_rank_that_fails_is_named(how, said, tmp_path):
    flag = tmp_path / "flag"
    function = "goes_on" if how.isupper() else how
    callback = f"+callbacks.harm={{_target_: faults.Harmed, how: {function}, flag: {flag}}}"
    environment = {how: f"1:{flag}"} if how.isupper() else {}
    words = [*SMALL, FLOAT32, "trainer=ddp", "trainer.timeout_s=8", callback]
    done = run_on_null_gpus("train", *words, logs=tmp_path, devices=2, environment=environment)
    assert (
        done.code == 1
        and done.record["error"]["rank"] == 1
        and said in done.record["error"]["message"]
    ), done.output


def test_the_largest_batch_fills_the_device_and_trains(tmp_path):
    words = ["data=synthetic", "data.num_images=40000", "model=small_cnn", "data.global_batch_size=max", "test=false",
             "callbacks.checkpoints=null", "trainer.limit_train_batches=2", "trainer.max_epochs=1", "trainer=gpu",
             "trainer.limit_val_batches=1"]  # fmt: skip
    options = {"memory_gib": 2, "compute": False}
    command = [sys.executable, "src/train.py", *words, f"paths.log_dir={tmp_path}", "run_id=r"]
    done = subprocess.run(
        command, env=null_gpus(**options), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "train/runs/r/run.json").read_text())["largest_batch"]
    assert (
        found["bounded_by"] == "memory" and 0.9 < found["peak_memory_gib"] / found["limit_gib"] <= 1
    ), found
    assert found["limit_gib"] == pytest.approx(
        0.95 * (2 - 400 / 1024), abs=0.001
    )  # the context takes 400 MiB


REFUSED = [
    ({"NULLGPU_CAPABILITY": "7.0"}, "no kernels for simulated GPU (capability 7.0)"),
    ({"NULLGPU_DRIVER": "535.54.03"}, "cannot use the driver's GPUs"),
]


@pytest.mark.parametrize(("environment", "said"), REFUSED, ids=["volta", "driver"])
def test_a_run_on_unusable_gpus_names_the_build(environment, said, tmp_path):
    done = run_on_null_gpus("train", *SMALL, "trainer=gpu", logs=tmp_path, environment=environment)
    assert done.code == 2 and said in done.output, done.output
    assert "make install DEVICE=cu126" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(("environment", "said"), REFUSED, ids=["volta", "driver"])
def test_the_doctor_names_the_build_for_unusable_gpus(environment, said):
    command = [sys.executable, REPOSITORY / "src/doctor.py", "trainer=gpu"]
    done = subprocess.run(
        command, env=null_gpus() | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and said in done.stdout, done
    assert "make install DEVICE=cu126" in done.stdout


def test_the_doctor_of_two_nodes_measures_nccl():
    command = [
        sys.executable,
        "src/doctor.py",
        "trainer=ddp",
        "trainer.num_nodes=2",
        "trainer.devices=1",
    ]
    nodes, port = [], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in "01":
        environment = {
            **null_gpus(devices=2),
            **port,
            "NODE_RANK": rank,
            "CUDA_VISIBLE_DEVICES": rank,
        }
        nodes.append(
            subprocess.Popen(
                command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
            )
        )
    for node in nodes:
        said, _ = node.communicate(timeout=200)
        assert node.returncode == 0 and "uses the driver" in said, said
        assert (
            "all-reduce of 32 MiB by gloo: " in said and "all-reduce of 32 MiB by NCCL: " in said
        ), said


def test_compilation(tmp_path):
    words = [
        "trainer=gpu",
        "trainer.compile=true",
        "callbacks.checkpoints=null",
    ]  # Triton's kernels compute nothing
    done = run_on_null_gpus("train", *SMALL, *words, logs=tmp_path, compute=False)
    assert done.code == 0, done.output


@pytest.mark.parametrize(
    ("parts", "compute"),
    [("machine,ceilings,step,synchronisations,data,strategies,checkpoints,profile", True),
     ("compiled,memory", False)],  # Triton's kernels compute nothing, and a search only measures
)  # fmt: skip
@pytest.mark.timeout(900)
def test_every_part_of_the_gpu_benchmark_reaches_its_figures(parts, compute, tmp_path):
    own = ["--out", str(tmp_path), "--small", "--budget", "900", "--only", parts]
    command = [sys.executable, "benchmarks/gpu.py", *own]
    done = subprocess.run(
        command, env=null_gpus(compute=compute), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [*found] == parts.split(",") and not any(
        "error" in figures for figures in found.values()
    )
    if compute:
        assert found["synchronisations"]["bf16-mixed"] == 0
    else:
        assert found["compiled"]["over_eager"] > 0 and found["compiled"]["graphs_over_eager"] > 0


@pytest.mark.parametrize(
    "name", ["lockstep/strategies/test_gpu.py", "strategies/test_data_parallel.py"]
)
def test_tests_that_need_a_gpu_pass(name):
    path = REPOSITORY / "tests" / name
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        command, env=null_gpus(devices=2), cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, (
        done.stdout
    )

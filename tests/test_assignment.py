"""The assignment in one command: its steps in order, each once, from where it stopped; rehearsed whole in small."""

import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import assignment
import logbook as logbook_script
from faults import signal_at_step
from hosts import wait_until
from lockstep.config.compose import compose, plain
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_record, write_record
from null_gpus import needs_null_gpus, null_gpus
from object_store import shared_store
from ranks import SRC, free_port
from runs import run_door

TINY = ["model=vit_tiny_32", "model.depth=1", "model.embed_dim=24", "data=synthetic", "data.num_images=400",
        "data.num_test_images=60", "data.image_size=32", "data.eval_batch_size=8", "trainer.num_threads=1",
        "trainer.timeout_s=120"]  # fmt: skip


@pytest.fixture
def node(tmp_path):
    """A function that does the assignment with fake scripts: `codes` are the exit codes of steps by their names."""
    began = []

    def go(*words, codes=None, number=0, correct=50.0, images=6000.0, precision="32-true"):
        def run(step):
            began.append(step)
            if step.name == "train ddp":
                leave("train", "a-ddp", 50.0, "")
            if step.name == "train fsdp":
                leave("train", "a-fsdp", 50.0, "")
            if step.name.startswith("test"):
                leave("eval", f"some-id-{len(began)}", correct, step.command[1])
            return (codes or {}).get(step.name, 0)

        def leave(task, run_id, right, word):
            record = RunRecord(run_id=run_id, overrides=[word], started_at=f"2026-11-20T00:00:{len(began):02d}Z")
            record.metrics = {"test/correct": right, "test/images": images}
            record.precision = precision
            write_record(RunFolder(tmp_path / task / "runs" / run_id).record, record)

        began.clear()
        argv = ["--s3", "s3://bucket/prefix/", "--name", "a", "--nodes", "2", "--node", str(number), "--master", "host"]
        own = ["--logs", str(tmp_path), "--logbook", str(tmp_path / "logbook")]
        return assignment.main([*argv, *own, *words], run), list(began)

    return go


def test_node_zero_does_every_step_in_order_and_none_twice(node, capsys):
    code, began = node()
    names = ["train ddp", "train fsdp", "test ddp", "note", "test fsdp", "note", "compare", "publish"]
    assert code == 0 and [step.name for step in began] == names
    assert began[0].variables == {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    assert "50 of 6,000 right" in began[3].command[-1] and began[3].command[-2] == "a-ddp"
    assert began[2].command[1] == "ckpt_path=s3://bucket/prefix/a-ddp" and began[2].variables == {}
    assert began[6].command[-5:-2] == ["a-ddp", "a-fsdp", "--keep"]
    said = capsys.readouterr().out
    assert all(f"assignment {number}/6: " in said for number in range(1, 7))
    assert node() == (0, []) and "done at" in capsys.readouterr().out


def test_another_node_trains_only(node, capsys):
    code, began = node(number=1)
    assert code == 0 and [step.name for step in began] == ["train ddp", "train fsdp"]
    assert began[1].variables["NODE_RANK"] == "1" and "pages are written on node 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train fsdp", "test ddp", "publish"])
def test_what_failed_is_where_the_same_command_goes_on(name, node, capsys):
    code, began = node(codes={name: 75})
    assert code == 75 and began[-1].name == name
    assert ". The same command, typed again on every node, goes on" in capsys.readouterr().out
    code, again = node()
    assert code == 0 and again[0].name == name


def test_a_checkpoint_that_counts_otherwise_is_no_hand_in(node, capsys):
    code, began = node(correct=49.0)
    assert code == 1 and [step.name for step in began] == ["train ddp", "train fsdp", "test ddp"]
    assert "a-ddp counted [50.0, 6000.0]" in capsys.readouterr().err


def test_a_test_of_no_images_is_no_hand_in(node):
    assert node(correct=50.0, images=0.0)[0] == 1


def test_in_sixteen_bits_a_few_images_may_be_counted_otherwise(node, capsys):
    code, began = node(correct=49.0, precision="bf16-mixed")
    assert code == 0 and "49 of 6,000 right, the run itself counted 50: each strategy rounds bf16-mixed" in str(began)
    (folder,) = {step.command[2] for step in began if step.name == "note"}
    shutil.rmtree(Path(folder).parent / "assignment")
    code, _ = node(correct=37.0, precision="bf16-mixed")
    assert code == 1 and "a-ddp counted [50.0, 6000.0]" in capsys.readouterr().err


def test_a_training_composes_and_what_was_typed_wins(node):
    _, began = node("--", "trainer.max_epochs=3", "data.global_batch_size=64", "data.root=/images")
    for step, strategy in zip(began, ("DDP", "Sharded"), strict=False):
        config = plain(compose("train", step.command[1:]))
        assert strategy in config["trainer"]["strategy"]["_target_"] and config["trainer"]["num_nodes"] == 2
        assert config["trainer"]["max_epochs"] == 3 and config["data"]["global_batch_size"] == 64
        assert config["model"]["name"] == "vit_base_patch32_224" and config["s3"]["uri"] == "s3://bucket/prefix"
    assert began[2].command[-1] == "data.root=/images" and "trainer.max_epochs=3" not in began[2].command


def test_without_more_words_it_is_the_source_assignment(node):
    _, began = node()
    config = plain(compose("train", began[0].command[1:]))
    assert config["trainer"]["max_epochs"] == 26 and config["data"]["global_batch_size"] == "max"
    assert (config["data"]["name"], config["model"]["pretrained"], config["logbook"]) == ("cifar10", True, "keep")


def test_other_options_for_what_is_done_are_refused(node, capsys):
    node(codes={"train fsdp": 1})
    code, began = node("--", "trainer.max_epochs=3")
    assert code == 2 and not began and "begin anew with another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--s3", "bucket"], "give s3://bucket/prefix"),
        (["--node", "2"], "of 2 nodes give 0 to 1"),
        (["--strategies", "ddp,dp"], "there are ddp, fsdp, ddp_sim and fsdp_sim"),
        (["--name", "../x"], "cannot name a folder"),
        (["--master", ""], "--master HOST"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, said, node, capsys):
    assert node(*words)[0] == 2 and said in capsys.readouterr().err


def test_a_state_that_is_none_is_named(node, tmp_path, capsys):
    (tmp_path / "assignment").mkdir()
    (tmp_path / "assignment/a-node0.json").write_text("[1]")
    assert node()[0] == 2 and "remove it" in capsys.readouterr().err


STEP = """
import signal, sys, time
def end(*_):
    open("ended", "w")
    sys.exit({code})
signal.signal(signal.SIGTERM, end)
open("began", "w")
time.sleep(60)
"""


@pytest.fixture
def step(tmp_path):
    """A function that starts a step which ends with `code` when it is told to, and waits until it has begun."""

    def start(code):
        (tmp_path / "step.py").write_text(STEP.format(code=code))
        own = f"import sys; sys.path.insert(0, {str(SRC)!r}); import assignment as a\n"
        own += f"sys.exit(a.run_script(a.Step('x', '', [{str(tmp_path / 'step.py')!r}], {{}})))"
        process = subprocess.Popen([sys.executable, "-c", own], cwd=tmp_path)
        wait_until((tmp_path / "began").exists, 20)
        return process

    return start


@pytest.mark.parametrize("code", [75, 0])
def test_a_signal_goes_on_to_the_step_and_nothing_more_is_begun(code, step):
    """Also where the step had just come to a good end."""
    process = step(code)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75


def test_a_step_does_not_outlive_the_command(step, tmp_path):
    process = step(0)
    process.kill()
    process.wait()
    wait_until((tmp_path / "ended").exists, 20)


def check_hand_in(tmp_path, strategies):
    """What node 0 hands in."""
    logs, logbook = tmp_path / "node0/logs", tmp_path / "node0/logbook"
    for strategy in strategies:
        run_id = f"assignment-{strategy}"
        record = read_record(RunFolder(logs / "train/runs" / run_id).record)
        assert record.status == "finished" and record.upload.error is None and record.best_checkpoint.s3_uri
        found = record.largest_batch
        assert record.global_batch_size == found.global_ > 1 and found.bounded_by == "memory"
        page = (logbook / f"vit_{strategy.removesuffix('_sim')}.md").read_text()
        assert f"{found.per_device} per device" in page or f"| {found.per_device}" in page, page
        assert run_id in page
    [comparison] = logbook.glob("compare-*.md")
    assert "Largest batch per device" in comparison.read_text()
    [report] = (logbook / "reports").glob("*.html")
    assert report.name in (logbook / "README.md").read_text() + comparison.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_small_on_cpus_stopped_in_the_middle_and_typed_again(tmp_path):
    server, began = shared_store(), []
    logs, logbook = tmp_path / "node0/logs", tmp_path / "node0/logbook"
    places = ["--s3", f"s3://{server.new_bucket()}/runs", "--endpoint-url", server.endpoint_url]
    places += ["--logs", str(logs), "--logbook", str(logbook), "--strategies", "ddp_sim,fsdp_sim"]
    argv = [*places, "--", *TINY, "trainer.memory_limit_gib=0.015", "trainer.max_epochs=6"]

    def run(step, before=None):
        """The script of a step, forked from a server that has imported torch."""
        began.append(step.name)
        if step.command[0] == "src/logbook.py":
            return logbook_script.main(step.command[1:])
        door = step.command[0].removeprefix("src/").removesuffix(".py")
        done = run_door(door, *step.command[1:], logs=logs, environment=server.environment(), before=before)
        assert done.code in (0, 75), done.output
        return done.code

    stop = partial(signal_at_step, 6, signal.SIGTERM)
    assert assignment.main(argv, lambda step: run(step, stop)) == 75 and began == ["train ddp_sim"]
    assert assignment.main(argv, run) == 0
    trained = ["train ddp_sim", "train fsdp_sim"]
    assert began[1:] == [*trained, "test ddp_sim", "note", "test fsdp_sim", "note", "compare", "publish"]
    check_hand_in(tmp_path, ["ddp_sim", "fsdp_sim"])
    restarts = read_record(RunFolder(logs / "train/runs/assignment-ddp_sim").record).restarts
    assert len(restarts) == 1 and restarts[0].resumed_step >= 6
    assert len(json.loads((logs / "assignment/assignment-node0.json").read_text())) == 6
    assert assignment.main(argv, run) == 0 and len(began) == 9
    assert (logbook / "notes/assignment-ddp_sim.md").read_text().count("Tested again from the bucket") == 1


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_small_on_two_nodes_of_null_gpus_each_with_its_own_disk(tmp_path):
    server, port = shared_store(), str(free_port())
    place = ["--s3", f"s3://{server.new_bucket()}/runs", "--endpoint-url", server.endpoint_url, "--nodes", "2"]
    nodes = []
    for number in (0, 1):
        own = tmp_path / f"node{number}"
        own.mkdir()
        words = [*place, "--node", str(number), "--master", "127.0.0.1", "--port", port, "--logs", str(own / "logs"),
                 "--logbook", str(own / "logbook"), "--", *TINY, "trainer.memory_limit_gib=0.22",
                 "trainer.max_epochs=1"]  # fmt: skip
        variables = null_gpus(devices=2) | server.environment()
        variables |= {"CUDA_VISIBLE_DEVICES": str(number), "LOCKSTEP_SECRET": "of these two nodes"}
        with (own / "output.txt").open("w") as file:
            command = [sys.executable, str(SRC / "assignment.py"), *words]
            nodes.append(subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [node.wait(800) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    assert codes == [0, 0], "\n".join((tmp_path / f"node{n}/output.txt").read_text() for n in (0, 1))
    check_hand_in(tmp_path, ["ddp", "fsdp"])
    for name in ("ddp", "fsdp"):
        page = (tmp_path / f"node0/logbook/vit_{name}.md").read_text()
        assert "nvidia-smi, node0-end" in page and "nvidia-smi, node1-end" in page

"""What a run's section says of each kind of run."""

import re

import pytest

from example_runs import example_record
from lockstep.pages.comparison_page import numbers_table, started_with
from lockstep.pages.entry import Entry
from lockstep.pages.experiment_page import run_section, summary_rows
from lockstep.pages.facts import RunFacts
from lockstep.pages.index_page import best_runs
from lockstep.pages.measured import measured_values
from lockstep.pages.run_details import changes_block, hardware_block, restarts_block


def entry_of(samples=None, reports=(), **changes) -> Entry:
    source = {"run_id": "run-1", "record": example_record("run-1", **changes), "hardware": samples or {}}
    return Entry(RunFacts(source), reports=reports)


def summary(entry: Entry) -> dict[str, str]:
    return {name: value.replace("\N{NO-BREAK SPACE}", " ") for name, value in summary_rows(entry)}


def test_a_peer_shows_its_swarm_and_not_a_batch_of_its_own():
    swarm = {"name": "lockstep", "steps": 20, "peers": 2}
    rows = summary(entry_of(trainer="hivemind", swarm=swarm, world_size=1, per_device_batch_size=32))
    assert rows["Swarm"] == "lockstep, 2 peers in its last step, 20 steps of all peers together"
    assert rows["Global batch"] == "256 = pieces of 32 from all peers of the swarm"
    rows = summary(entry_of())
    assert "Swarm" not in rows and rows["Global batch"] == "256 = 64 per device × 2 devices × 2 accumulated"


def test_goodput_and_ranks_are_read_as_a_record_holds_them():
    slow, fast = ({"rank": rank, "host": f"node-{host}", "own_seconds": own} for rank, host, own in
                  ((3, "b", 0.21), (0, "a", 0.198)))  # fmt: skip
    throughput = {"images_per_s": 100.0, "slowest_rank": slow, "fastest_rank": fast}
    rows = summary(entry_of(throughput=throughput, goodput={"steps": 0.9, "wall": 0.875}, world_size=4))
    assert rows["Ranks"] == "slowest rank 3 on node-b 210 ms, fastest rank 0 on node-a 198 ms, of own work in a step"
    assert rows["Goodput"] == "90.0 % of the steps kept, 87.5 % of the time spent on them"
    rows = summary(entry_of(throughput=throughput, goodput={"steps": None, "wall": None}, world_size=1))
    assert "Ranks" not in rows and "Goodput" not in rows


@pytest.mark.parametrize("bound, said", [
    ("data set", "at 3.00 GiB of 15.00 GiB, all the data there is: more would fit into memory"),
    ("memory", "at 3.00 GiB of 15.00 GiB, limited by memory"), (None, "at 3.00 GiB of 15.00 GiB"),
])  # fmt: skip
def test_the_largest_batch_says_what_limited_it(bound, said):
    found = {"per_device": 500, "global": 1000, "peak_memory_gib": 3.0, "limit_gib": 15.0, "bounded_by": bound}
    assert summary(entry_of(largest_batch=found))["Largest batch"] == f"**500** per device, 1,000 global, {said}"


def test_a_resumed_run_s_hardware_is_that_of_all_its_starts():
    stats = {"rank0/memory_gib": {"p50": 1.0, "max": 1.5}, "cpu/percent": {"p50": 10, "max": 20}}
    nodes = {"nodes": [{"node_rank": 0, "host": "a", "stats": stats}]}
    joined = {"0": {"stats": {"rank0/memory_gib": {"p50": 2.0, "max": 2.5}}, "series": {}}}
    restarts = [{"at": "2026-11-20T20:20:00Z", "resumed_step": 10, "command": "python src/train.py resume=run-1"}]
    once, twice = (entry_of(joined, hardware=nodes, restarts=these) for these in ([], restarts))
    assert [s["max"] for _, _, s in once.facts.device_stats] == [20, 1.5] and once.facts.peak_memory_gib == 1.5
    assert [s["max"] for _, _, s in twice.facts.device_stats] == [20, 2.5] and twice.facts.peak_memory_gib == 2.5
    assert "| `rank0/memory_gib` | – | 2 | – | 2.5 |" in hardware_block(twice)
    assert "| 10 | – | – | `python src/train.py resume=run-1` |" in restarts_block(twice)


def test_a_run_that_went_on_with_another_command_says_both():
    first, later = "python src/train.py trainer.max_epochs=60", "python src/train.py resume=run-1 trainer.max_epochs=10"
    restarts = [{"at": "2026-11-20T20:20:00Z", "command": command} for command in (first, None, later, later)]
    entry = entry_of(command=first, restarts=restarts)
    block = f"```sh\n{first}\n# then:\n{later}\n```\n"
    assert block in run_section(entry, None)
    assert block in best_runs([entry]) and block in started_with(entry, "a")
    assert entry_of(command=first).facts.commands == first


def test_the_best_checkpoint_s_epoch_counts_from_one_as_on_the_terminal():
    best = {"path": "checkpoints/best.ckpt", "epoch": 0, "step": 175, "s3_uri": "s3://b/best.ckpt"}
    assert (
        summary(entry_of(best_checkpoint=best, upload={}))["Best checkpoint"] == "`s3://b/best.ckpt`, epoch 1, step 175"
    )


def test_images_that_fill_no_batch_are_said_to_be_left_out():
    said = "; each epoch leaves out 25 images that fill no batch, others each time"
    entry = entry_of(left_out_per_epoch=25)
    assert summary(entry)["Global batch"] == f"256 = 64 per device × 2 devices × 2 accumulated{said}"
    short = entry_of(left_out_per_epoch=25)
    short.facts.source["config"] = {"trainer.limit_train_batches": 0.2}
    for other in (
        entry_of(left_out_per_epoch=0),
        entry_of(),
        entry_of(left_out_per_epoch=25, trainer="hivemind"),
        short,
    ):
        assert "leaves out" not in summary(other)["Global batch"]


def test_what_was_typed_stands_before_what_came_along_with_it():
    entry = entry_of(
        overrides=["trainer=ddp", "+optimizer.betas=[0.8,0.9]", "experiment=vit", "run_id=x", "seed=42", "model.head=3"]
    )
    changed = {"choices.experiment": [None, "vit"], "choices.trainer": ["cpu", "ddp"], "model.head.width": [1, 3],
               "model.headless": [False, True], "optimizer.betas": [None, [0.8, 0.9]], "trainer.n": [1, 2]}  # fmt: skip
    entry.facts.source["changed"] = changed
    entry.facts.source["config"] = {key: pair[1] for key, pair in changed.items()} | {"seed": 42}
    typed, came = changes_block(entry, None).split("<details><summary>")
    assert re.findall(r"^\| `([\w.]+)`", typed, re.MULTILINE) == [
        "trainer", "optimizer.betas", "experiment", "model.head.width"
    ]  # fmt: skip
    assert came.startswith("Came along with these: 2 keys</summary>")
    assert re.findall(r"^\| `([\w.]+)`", came, re.MULTILINE) == ["model.headless", "trainer.n"]


def test_a_restart_on_other_ranks_says_on_how_many():
    at = "2026-11-20T20:20:00Z"
    same = {"at": at, "resumed_step": 10, "previous_world_size": 2, "world_size": 2, "num_nodes": 1}
    other = {**same, "resumed_step": 20, "world_size": 4, "num_nodes": 2}
    assert "ranks" not in restarts_block(entry_of(restarts=[same]))
    shown = restarts_block(entry_of(restarts=[same, other]))
    assert f"| {at} | 10 | – | – | 2 |" in shown and f"| {at} | 20 | – | – | 2 → 4 on 2 nodes |" in shown


@pytest.mark.parametrize(
    "changes, is_said",
    [
        ({}, True),
        ({"task_name": "eval"}, False),
        ({"code": {"commit": None}}, False),
    ],
)
def test_the_commands_that_repeat_a_run_are_on_its_page(changes, is_said):
    assert ("git worktree add ../run-1 " in run_section(entry_of(**changes), None)) == is_said


@pytest.mark.parametrize("start", [{"initial_weights": "/w.pt"}, {}])
def test_the_weights_that_a_run_began_with_have_their_hash(start):
    entry = entry_of(initial_weights_sha256="ab12", **start)
    entry.facts.source["config"] = {"model.weights": "/w.pt"}
    assert summary(entry)["Started from the weights of"] == "`/w.pt`, sha256 `ab12`"
    assert "Started from the weights of" not in summary(entry_of())


def test_nodes_of_one_host_are_counted():
    hosts = [{"node_rank": 0, "host": "vm"}, {"node_rank": 1, "host": "vm"}]
    assert summary(entry_of(hosts=hosts, launcher="none", versions={}))["Started on"] == "`vm (2 nodes)`"
    rows = summary(entry_of(hosts=[*hosts, {"host": "b"}], launcher="slurm", versions={}))
    assert rows["Started on"] == "`vm (2 nodes), b`, launched by slurm"


def test_the_config_s_own_metrics_stand_among_the_results_and_in_a_comparison():
    tested = {"test/acc": 0.7, "test/mcc": 0.70374, "test/a|b": 12345.6, "val/mcc": 0.6, "val/acc": 0.7}
    entries = [entry_of(metrics=metrics) for metrics in (tested, {"val/mcc": -0.25}, {"val/kappa": 0.5})]
    for entry in entries[:2]:
        entry.facts.source["config"] = {
            "metrics.mcc._target_": "x.Mcc",
            "metrics.a|b._target_": "y.B",
            "metrics.off": None,
        }
    rows = [summary(entry).get("Metrics of the config") for entry in entries]
    assert rows == ["test/mcc 0.7037, test/a\\|b 1.235e+04", "val/mcc -0.25", None]
    cells = dict(measured_values(entries))
    assert cells["test/mcc"] == ["0.7037", "–", "–"] and cells["val/mcc"] == ["0.6", "-0.25", "–"]
    assert "val/kappa" not in cells and "| test/a\\|b | 1.235e+04 |" in numbers_table(entries, ["a", "b", "c"])


def test_a_report_that_github_shows_as_source_says_how_to_open_it():
    local, far = "[a](reports/a.html)", "[a](https://pages.example/a.html)"
    said = "GitHub shows an HTML file as its source: download it and open it in a browser"
    assert summary(entry_of(reports=(local,)))["Report"] == f"{local} ({said})"
    assert summary(entry_of(reports=(far,)))["Report"] == far

"""The pages: what stands on them, in which order, and that no text of a run becomes markup."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from example_runs import write_run
from lockstep.logbook import render
from lockstep.logbook.build import build, keep_run, summarise, write_page
from lockstep.logbook.compare import result_rows
from lockstep.logbook.figures import run_panels
from lockstep.logbook.folders import NOTE_MARKS, RecordedRun, read_run
from lockstep.logbook.report import page_data
from lockstep.process.project import REPOSITORY
from lockstep.records.proof_table import CheckResult, write_table
from lockstep.records.record import RunRecord

HEADINGS = [
    "Results", "How it was started", "What it cost", "Curves", "Data", "Environment and code",
    "What differs from the recipe vit_ddp",
]  # fmt: skip


def spaced(text):
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_page_answers_in_the_order_of_a_reviewer(folders):
    text = spaced(write_page(summarise(folders[0])).read_text())
    assert re.findall("^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert (
        "| **accuracy** (chooses the best checkpoint) | 87.10 % ± 0.47 % | 86.43 % ± 0.34 % |"
        in text
    )
    assert "`s3://models/vit/ddp/best-step00001925.ckpt`" in text
    assert "cd ../ddp\npython src/train.py experiment=vit_ddp trainer.devices=2\n" in text
    assert (
        "| Largest batch | 412 per device, 824 global, 14.2 GiB of 14.6 GiB, limited by the memory |"
        in text
    )
    assert "| Training time | 7 min 11 s for 12 epochs, 2,100 steps |" in text
    assert "| GPU utilisation | 9" in text and "NVIDIA-SMI 570.00" in text
    assert "tensorboard --logdir" in text and "![Curves of ddp](curves.svg)" in text
    assert "| `trainer.devices` | `1` | `2` |" in text


def test_a_page_has_the_error_the_diff_and_the_data(folders):
    report = {
        "duplicates": 12,
        "skipped": ["a.gif", "b.txt"],
        "groups": "patient_id: 30 groups, 24 to train, 3 to validate, 3 to test",
        "images_per_class": {"cat": {"train": 5, "test": 2}},
    }
    record = json.loads((folders[2] / "run.json").read_text())
    (folders[2] / "run.json").write_text(json.dumps({**record, "data_report": report}))
    text = write_page(summarise(folders[2])).read_text()
    assert "**❌ out of memory**" in text and "**Error** of rank 1 on node-a, exit code 1:" in text
    assert "-lr = 1\n+lr = 2" in text and "code.diff" in text
    assert "| 2026-11-20T22:45:00Z | 100 | 12 | 31\N{NO-BREAK SPACE}s |" in text
    assert "| Hash | `17ca19f1db5a` |\n| duplicates | 12 |\n| skipped | a.gif, b.txt |" in text
    assert f"| groups | {report['groups']} |" in text
    assert "|  | train | test |\n|---|--:|--:|\n| cat | 5 | 2 |\n" in text


@pytest.mark.parametrize("name, test", [("val_rmse", "test_rmse"), ("score", "test/score")])
def test_any_metric_may_be_monitored(tmp_path, name, test):
    """On the page, in the index, in a comparison, in the report and in the figure, before all other
    metrics.
    """
    metrics = {
        name: 0.5,
        f"{name}_best": 0.75,
        test: 0.25,
        "val/acc": 0.5,
        "val/acc_best": 0.625,
        "train/loss": 1.0,
    }
    best = {"epoch": 3, "step": 70, "metric": {name: 0.75, "val/acc": 0.625}}
    changes = {"monitor": name, "metrics": metrics, "best_checkpoint": best}
    folder = write_run(tmp_path / "runs", "r", **changes)
    rows = "".join(f"{step},0.{step},1.0\n" for step in range(60, 80))
    (folder / "metrics.csv").write_text(f"step,{name},train/loss\n{rows}")
    page = keep_run(folder, tmp_path / "logbook")
    text, run = page.read_text(), read_run(page.parent)
    first, second, *_ = text.split("|--:|\n")[1].splitlines()
    label = re.sub("^val[/_]", "", name)
    assert (
        first == f"| **{label}** (chooses the best checkpoint) | 0.75 | 0.25 |"
        and "accuracy" in second
    )
    assert f"| 0.25 | {name} 0.75 |" in (tmp_path / "logbook/README.md").read_text()
    assert dict(result_rows([run, run]))[f"Best {name}"] == ["0.75", "0.75"]
    assert page_data([run])["runs"][0]["headline"] == "0.25"
    assert name in run_panels(run)[1][2] and name in (page.parent / "curves.svg").read_text()


def test_a_record_with_nothing_but_its_status_has_a_page(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text(
        '{"status": "failed", "unknown": [1], "throughput": null}'
    )
    text = keep_run(tmp_path / "r", tmp_path / "logbook").read_text()
    assert "| ❌ failed [r](r/page.md) |" in (tmp_path / "logbook" / "README.md").read_text()
    assert "The run has no results." in text and "No curves" in text and "None" not in text


def test_pictures_have_the_same_bytes_each_time_and_parse(folders, tmp_path):
    write_page(summarise(folders[0]))
    first = (folders[0] / "curves.svg").read_bytes()
    write_page(read_run(folders[0]))
    assert (folders[0] / "curves.svg").read_bytes() == first and len(first) < 100_000
    titles = [
        node.text for node in ElementTree.fromstring(first).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {
        "Loss",
        "Learning rate",
        "Utilisation in %",
        "hardware/gpu_percent",
        "hardware/cpu_percent",
    } <= set(titles)


def test_the_pictures_of_a_run_are_copied_and_shown(folders, tmp_path):
    (folders[0] / "mistakes.png").write_bytes(b"\x89PNG")
    page = keep_run(folders[0], tmp_path / "logbook")
    assert (page.parent / "mistakes.png").read_bytes() == b"\x89PNG"
    assert "](mistakes.png)" in page.read_text() and "batch.png" not in page.read_text()


def test_a_kept_run_is_a_slim_copy_without_secrets(folders, tmp_path):
    logbook = tmp_path / "logbook"
    logbook.mkdir()
    (logbook / "two-ways.md").write_text("# Two ways\n\n…")
    (logbook / "x.html").write_text("<title>All | curves</title>")
    (folders[0] / "code.diff").write_text("+key = 'AKIAIOSFODNN7EXAMPLE'\n")
    (folders[0] / "checkpoints").mkdir()
    rows = "".join(f"{step},,0.5,\n" for step in range(3000)) + "3000,0.75,0.5,9\n"
    (folders[0] / "metrics.csv").write_text(f"step,val/acc,train/loss,lr\n{rows}")
    page = keep_run(folders[0], logbook)
    names = sorted(path.name for path in page.parent.iterdir())
    assert names == ["code.diff", "curves.svg", "metrics.csv", "page.md", "run.json"]
    assert "AKIA" not in "".join(path.read_text() for path in page.parent.iterdir())
    lines = (page.parent / "metrics.csv").read_text().splitlines()
    assert 250 < len(lines) < 310 and lines[-1] == "3000,0.75,0.5,9"
    assert read_run(page.parent).record.summary == read_run(folders[0]).record.summary
    index = (logbook / "README.md").read_text()
    assert "| ✅ [ddp](ddp/page.md) | cifar10 | vit_tiny_32 | ddp × 2 | 86.43" in index
    assert (
        "\n- **[Two ways](two-ways.md)**\n" in index
        and "\n- [All &#124; curves](x.html)\n" in index
    )


def test_a_kept_run_has_validations_of_any_name(folders, tmp_path):
    rows = "".join(f"{step},,0.5\n" for step in range(3001)) + "1,0.75,0.5\n" * 2
    (folders[0] / "metrics.csv").write_text(f"step,validation_loss,train/loss\n{rows}2,,1\n")
    page = keep_run(folders[0], tmp_path / "logbook")
    assert (page.parent / "metrics.csv").read_text().count("0.75") == 2


def test_build_skips_what_it_cannot_read(folders, tmp_path):
    logbook = tmp_path / "logbook"
    for folder in folders[:2]:
        keep_run(folder, logbook)
    (logbook / "ddp/page.md").unlink()
    (logbook / "fsdp/run.json").write_text('{"run_id": "fs')
    (error,) = build(logbook)
    assert "fsdp" in error and "7 min 11 s for 12 epochs" in spaced(
        (logbook / "ddp/page.md").read_text()
    )
    before = {path: path.read_bytes() for path in logbook.rglob("*") if path.is_file()}
    build(logbook)
    assert {path: path.read_bytes() for path in logbook.rglob("*") if path.is_file()} == before


def test_words_and_heading_of_the_user_stay(folders, tmp_path):
    page = write_page(summarise(folders[0]))
    text = page.read_text().replace("# ddp\n", "# the <good> one\n", 1)
    page.write_text(
        text.replace(NOTE_MARKS[0], f"{NOTE_MARKS[0]}\nGood *curve*.\n\nUsed AKIAIOSFODNN7EXAMPLE.")
    )
    text = keep_run(folders[0], tmp_path / "logbook").read_text()
    for _ in range(2):  # and once more from the record
        assert (
            text.startswith("# the &#60;good&#62; one\n")
            and "\nGood *curve*.\n\nUsed [redacted].\n" in text
        )
        assert (
            "[the &#60;good&#62; one](ddp/page.md)" in (tmp_path / "logbook/README.md").read_text()
        )
        assert build(tmp_path / "logbook") == []
        text = (tmp_path / "logbook/ddp/page.md").read_text()
    (tmp_path / "logbook/ddp/page.md").write_text(text.replace("Good *curve*", "Edited here"))
    assert "\nEdited here.\n" in keep_run(folders[0], tmp_path / "logbook").read_text()


@pytest.mark.parametrize(
    "launcher, command, config, lines",
    [
        ("none", "python src/train.py", {"data.root": "data/birds"},
         ['ln -s "$(realpath data)" ../r/', "cd ../r", "python src/train.py", "Data: `data/birds` (`data.root`)."]),
        ("none", "python src/train.py", {"data._target_": "data.mnist.MNIST", "model.weights": "w/a.pth"},
         ['ln -s "$(realpath w)" ../r/', "Data: of `data.mnist.MNIST`.",
          "Weights: `w/a.pth` (`model.weights`), sha256 `5e`."]),
        ("none", "python src/train.py", {"model.weights": "logs/train/runs/a/checkpoints/b.ckpt"},
         ["mkdir -p ../r/logs/train/runs/", 'ln -s "$(realpath logs/train/runs/a)" ../r/logs/train/runs/',
          "cd ../r"]),
        ("slurm", "python src/train.py a=b", {"data.root": "/data/x"},
         ["cd ../r", "# inside an allocation:",
          "srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python src/train.py a=b",
          "# or as a job:", "sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 launch/train.sbatch 'a=[b, c]'"]),
        ("nodes", "python src/train.py", {"model.pretrained": True, "model.name": "vit"},
         ["# on each of the 2 nodes, with its own NODE_RANK:",
          "MASTER_ADDR=node-a MASTER_PORT=29500 WORLD_SIZE=8 NODE_RANK=0 python src/train.py",
          "Weights: those of timm's `vit`, from the Hugging Face hub, sha256 `5e`."]),
    ],
)  # fmt: skip
def test_a_page_says_how_to_repeat_its_run(tmp_path, launcher, command, config, lines):
    nodes = 1 if launcher == "none" else 2
    folder = write_run(
        tmp_path, "r", launcher=launcher, command=command, num_nodes=nodes, world_size=4 * nodes, accelerator="gpu",
        overrides=["a=[b, c]"], initial_weights_sha256="5e",
    )  # fmt: skip
    run = read_run(folder)
    run.config = config
    text = write_page(run).read_text()
    started = text[text.index("## How it was started") : text.index("## What it cost")].splitlines()
    assert [line for line in started if line in lines] == lines


TEXT = st.text(max_size=30) | st.sampled_from(
    ["a|b", "</details><script>alert(1)</script>", "`x` | `y`", "[x](javascript:alert(1))", "$x$", "\ud800", "| --- |",
     "```\n# heading", "<!--", "{{ 7 * 7 }}", "</script>", "\u202e", "https://x.example", "line\nbreak"]
)  # fmt: skip
ALLOWED = {
    "h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "pre", "strong", "details", "summary", "img",
    "a",
}  # fmt: skip


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.targets = set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.targets += [value for name, value in attrs if name in ("href", "src")]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXT, min_size=8, max_size=8))
def test_no_text_of_a_run_becomes_markup(tmp_path, texts):
    a, b, c, d, e, f, g, h = texts
    values = {
        "status": a, "tags": [b, c], "model": c, "data": d, "trainer": e, "command": f, "experiment": h,
        "error": {"message": g, "host": a}, "hosts": [{"host": b}], "versions": {c: d}, "metrics": {f"test/{e}": f},
        "summary": {"changed": [[a, b, c]], "classes": [[d, 1, 0.5, None, 0.5]],
                    "confusion": {"names": [e], "counts": [[1]]}}, "world_size": 2,
        "hardware": {"nodes": [{"host": f, "cpu": g, "gpus": [{"name": h}], "stats": {a: {"p50": 1}}}]},
        "best_checkpoint": {"path": b, "sha256": c}, "upload": {"error": d}, "data_report": {e: f, g: {h: 1}},
    }  # fmt: skip
    record = RunRecord()
    record.update(json.loads(json.dumps(values)))
    run = RecordedRun(tmp_path, record)
    text = render.render("run.md.j2", run=run, marks={}).encode("utf-8", "replace").decode()
    tags = Tags()
    tags.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert (
        tags.seen <= ALLOWED
        and tags.targets == []
        and len(re.findall("^## ", text, re.MULTILINE)) == 7
    )


# A page names what its reader can open


def local_run(root, **changes):
    """Write the folder of a run that has no bucket."""
    best = {"path": "checkpoints/best-step00000007.ckpt", "step": 7, "sha256": "5e", "bytes": 10**6}
    return write_run(root, "r", upload=None, best_checkpoint=best, **changes)


def test_a_page_in_the_runs_own_folder_names_its_files(tmp_path):
    text = write_page(summarise(local_run(tmp_path))).read_text()
    assert f"`tensorboard --logdir {tmp_path}/r/tensorboard`" in text
    assert f"Best checkpoint: `{tmp_path}/r/checkpoints/best-step00000007.ckpt`, 1" in text


def test_a_kept_page_names_no_file_of_the_machine(tmp_path):
    text = keep_run(local_run(tmp_path), tmp_path / "logbook").read_text()
    assert "tensorboard --logdir" not in text and "checkpoints/best" not in text
    assert "step 7, sha256 `5e`. It is in no bucket.\n" in text


def test_a_kept_page_names_the_bucket_of_its_events(folders, tmp_path):
    text = keep_run(folders[0], tmp_path / "logbook").read_text()
    assert "TensorBoard: `tensorboard --logdir s3://models/vit/ddp/tensorboard`\n" in text


def test_a_kept_page_links_the_reports_of_the_logbook_alone(tmp_path):
    addresses = {
        "kept": "../../logbook/a.html",
        "elsewhere": "../../b.html",
        "gone": "../../logbook/c.html",
        "public": "https://x.example/d.html",
    }
    for name in ("logbook/a.html", "b.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<title>x</title>")
    text = keep_run(
        local_run(tmp_path / "runs", reports=addresses), tmp_path / "logbook"
    ).read_text()
    assert re.findall(r"Interactive report: (\S+)", text) == [
        "[kept](../a.html)",
        "[public](https://x.example/d.html)",
    ]


@pytest.mark.parametrize(
    ("metrics", "curves"),
    [
        ("step,val/acc\n1,0.5\n2,0.6\n", True),
        ("step,train/reward\n1,0.5\n2,0.6\n", True),
        ("step,val/acc\n1,0.5\n", False),
        ("", False),
    ],
)
def test_a_page_has_curves_of_any_metric(tmp_path, metrics, curves):
    folder = local_run(tmp_path)
    (folder / "metrics.csv").write_text(metrics)
    page = keep_run(folder, tmp_path / "logbook")
    assert ("](curves.svg)" in page.read_text()) is curves
    assert ("No curves: " in page.read_text()) is not curves
    assert (page.parent / "metrics.csv").exists() is curves


# The end of a run derives what pages print


def test_curves_have_any_name_and_no_damaged_cell(tmp_path):
    folder = write_run(tmp_path, "r")
    (folder / "metrics.csv").write_text(
        'step,"val/acc/tabby, cat",lr\n1,0.5,\n2,nan,x\n3,0.25,1\n4,0.'
    )
    curves = {
        name: [values.tolist() for values in curve]
        for name, curve in read_run(folder).metrics.items()
    }
    assert curves == {"val/acc/tabby, cat": [[1, 3], [0.5, 0.25]], "lr": [[3], [1]]}


def test_a_second_summary_is_the_same(folders):
    (folders[0] / "confusion_matrix.csv").write_text("true \\ predicted,a,b\na,3,1\nb,0,4\n")
    summary = summarise(folders[0]).record.summary
    assert summary["best"] == {"val/loss": 0.412, "val/acc": 0.871}, "those of the best checkpoint"
    assert summary["classes"] == [
        ["a", 4, 1.0, 0.75, pytest.approx(6 / 7)],
        ["b", 4, 0.8, 1.0, pytest.approx(8 / 9)],
    ]
    assert summary["confusion"] == {"names": ["a", "b"], "counts": [[3, 1], [0, 4]]}
    text = (folders[0] / "run.json").read_text()
    assert json.loads(text)["summary"] == summary == summarise(folders[0]).record.summary
    assert (folders[0] / "run.json").read_text() == text


def test_a_share_of_counted_images_has_its_standard_error(tmp_path):
    monitored = {
        "monitor": "val/f1",
        "metrics": {"val/acc": 0.5, "val/images": 400, "val/f1": 0.4, "val/f1_best": 0.7},
    }
    record = summarise(write_run(tmp_path, "r", **monitored)).record
    assert record.summary["errors"] == {"val/acc": 0.024876}, "not that of F1"

    pixels = {"num_val": 400, "metrics": {"val/acc": 0.97, "test/acc": 0.96}}
    assert "errors" not in summarise(write_run(tmp_path, "s", **pixels)).record.summary


def test_the_worktree_of_a_page_links_data_by_whole_path(tmp_path):
    folder = tmp_path / "r"
    folder.mkdir()
    text = f"data: {{root: {REPOSITORY}/photos/birds}}\nmodel: {{weights: /elsewhere/a.pth}}\n"
    (folder / "config.yaml").write_text(text)
    assert RecordedRun(folder, RunRecord()).linked_folders == ["photos"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("RuntimeError: [enforce fail] can't allocate memory: you tried 8 bytes", "out of memory"),
        ("CUDA error: an illegal memory access was encountered", "failed"),
        ("unable to open shared memory object </torch_1> in read-write mode", "failed"),
    ],
)
def test_a_run_without_memory_has_its_own_status(tmp_path, message, status):
    record = write_run(tmp_path, "r", status="failed", error={"message": message})
    assert read_run(record).status == status


@pytest.mark.parametrize(("name", "value"), [("tags", ["a"]), ("tags.count", None)])
def test_a_value_of_a_run_is_no_method(tmp_path, name, value):
    assert RecordedRun(tmp_path, RunRecord(tags=["a"])).value(name) == value


@pytest.mark.parametrize(
    ("accelerator", "machine"), [("gpu", "3 × H100 + A10"), ("cpu", "2 × Xeon, 8 cores")]
)
def test_the_machine_of_a_run_counts_each_host_once(accelerator, machine, tmp_path):
    node = {"host": "a", "cpu": "Xeon", "cores": 8, "gpus": [{"name": "H100"}] * 2}
    other = {**node, "host": "b", "gpus": [{"name": "H100"}, {"name": "A10"}]}
    hardware = {"nodes": [node, node, other]}
    record = RunRecord(accelerator=accelerator, hardware=hardware)
    assert RecordedRun(tmp_path, record).machine == machine
    assert RecordedRun(tmp_path, RunRecord()).machine == ""


@pytest.mark.parametrize(
    ("root", "linked"), [("./photos/birds", ["photos"]), ("../photos", []), (".", [])]
)
def test_the_worktree_of_a_page_links_folders_of_the_repository(tmp_path, root, linked):
    (tmp_path / "config.yaml").write_text(f"data: {{root: {root}}}\n")
    assert RecordedRun(tmp_path, RunRecord()).linked_folders == linked


def write_proof(logs, name, reference, result):
    folder = logs / "prove" / name
    runs = write_run(folder / "train" / "runs", "reference", **reference)
    assert runs.is_dir()
    write_table(folder, ["experiment=vit_ddp"], [result], "24 steps, float64")


def test_a_kept_page_has_the_newest_proof_of_its_experiment(tmp_path):
    folder = write_run(tmp_path / "logs/train/runs", "ddp")
    equal, other = (
        CheckResult("repeat", True),
        CheckResult("ddp", False, 3, "loss by 1.0e+00", "a | sum"),
    )
    write_proof(tmp_path / "logs", "1", {}, equal)
    write_proof(tmp_path / "logs", "2", {}, other)
    write_proof(tmp_path / "logs", "3", {"experiment": "mine"}, equal)
    page = keep_run(folder, tmp_path / "logbook")
    build(tmp_path / "logbook")
    text = page.read_text()
    assert "| two ranks by DDP | **differs** | 3 | loss by 1.0e+00 | a &#124; sum |" in text
    assert "`python src/prove.py experiment=vit_ddp`: 24 steps, float64." in text
    assert "two runs of the same command" not in text


def test_a_run_of_another_model_has_no_proof(tmp_path):
    folder = write_run(tmp_path / "logs/train/runs", "ddp", model="resnet50")
    write_proof(tmp_path / "logs", "1", {}, CheckResult("repeat", True))
    text = keep_run(folder, tmp_path / "logbook").read_text()
    assert "Is the training the same?" not in text

"""The pages and the options: every command runs or composes as it is printed, every file that a
page tells to write works, every link leads somewhere, and the comments in configs/ explain every
option.
"""

import atexit
import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image

from command_server import CommandServer, is_script
from lockstep.config.compose import compose, plain
from lockstep.config.schema import help_text, keys_in_yaml, read_groups

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
PAGES = {
    path.name: path.read_text()
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
}
for name in ("options.md", "CHANGELOG.md"):
    PAGES.pop(name, None)
FILES = dict(
    re.findall(
        r"^`((?:src|configs)/\S+)`\n\n```\w+\n(.*?)```",
        "\n".join(PAGES.values()),
        re.DOTALL | re.MULTILINE,
    )
)


def test_every_option_has_a_description_and_every_key_a_comment():
    for group, options in read_groups(CONFIGS).items():
        for option in options:
            assert option.description, f"{group}={option.name}"
    named = {key.name for key in keys_in_yaml(CONFIGS / "trainer" / "default.yaml", "trainer")}
    assert {"trainer.max_epochs", "trainer.devices", "trainer.accumulate_grad_batches"} <= named


def test_help_lists_every_option():
    text = help_text(CONFIGS, "train", "what it does")
    for group, options in read_groups(CONFIGS).items():
        if group not in ("hydra", "paths"):
            assert f"{group}=" in text
            assert all(f" {option.name} " in text for option in options)


def test_help_lists_the_everyday_trainers_first():
    lines = help_text(CONFIGS, "train", "what it does").splitlines()
    first = lines[lines.index("trainer=") + 1 :][:7]
    names = [line.lstrip(" *").split()[0] for line in first]
    assert names == ["cpu", "gpu", "ddp", "fsdp", "ddp_sim", "fsdp_sim", "allreduce"]


def test_the_page_of_options_has_each_key_once():
    spec = importlib.util.spec_from_file_location(
        "make_options", REPOSITORY / "docs" / "make_options.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [line for line in module.options_page(CONFIGS).splitlines() if line.startswith("| `")]
    assert len(rows) <= 275 and len(rows) == len(set(rows))
    assert sum("`optimizer.lr`" in row for row in rows) == 2  # airbench's is another
    assert any("`data.val_dataset, data.test_dataset` | dataset" in row for row in rows)


def test_every_experiment_names_its_source_and_its_command():
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        text = path.read_text()
        assert "Source" in text and f"experiment={path.stem}" in text.partition("Command")[2], path


def test_every_link_of_a_page_leads_somewhere():
    for path in [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        *REPOSITORY.glob("benchmarks/*.md"),
    ]:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if "://" not in link:
                assert target.exists(), f"{path.name}: {link}"
                assert (
                    not anchor
                    or f'id="{anchor}"' in target.read_text()
                    or anchor in headings(target)
                ), link


def test_every_file_that_a_page_names_exists():
    example = re.compile(r"(src|configs)/\w+/(x|x_\w+|NAME)\.|src/utils/")
    for page, text in PAGES.items():
        named = re.findall(
            r"`((?:src|tests|configs|launch|docs|benchmarks|nullgpu)/[\w./-]*)`", text
        )
        missing = [
            name
            for name in named
            if not (name in FILES or example.match(name) or (REPOSITORY / name).exists())
        ]
        assert missing == [], page
    modules = {path.name for path in REPOSITORY.glob("src/lockstep/*/*.py")}
    assert set(re.findall(r"`(\w+\.py)`", PAGES["architecture.md"])) <= modules
    tests = re.findall(r"`((?:[\w]+/)*test_\w+\.py)`", PAGES["CONTRIBUTING.md"])
    assert [
        name for name in tests if not (REPOSITORY / "tests" / name.removeprefix("tests/")).exists()
    ] == []


def headings(path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_strategies_md_names_every_trainer_that_there_is():
    trainers = {path.stem for path in (CONFIGS / "trainer").glob("*.yaml")} - {"default"}
    text = PAGES["strategies.md"]
    assert {
        name for name in trainers if f"trainer={name}" not in text and f"={name}`" not in text
    } == set()


def test_the_pages_fit_a_screen():
    """No cell of a table is longer than a line, and the tasks of the how-to and of the data page
    have a command.
    """
    for name, text in PAGES.items():
        cells = re.findall(r"(?<=\| )[^|\n]+(?= \|)", re.sub(r"\]\([^)]*\)", "]", text))
        assert [cell for cell in cells if len(cell) > 125] == [], name
    for page in ("howto.md", "data.md"):
        sections = re.split(r"^## ", PAGES[page], flags=re.MULTILINE)[1:]
        assert [part.splitlines()[0] for part in sections if "python src/" not in part] == []
    assert (
        len(re.findall(r"^\| ", PAGES["strategies.md"].partition("## Glossary")[2], re.MULTILINE))
        <= 16
    )


def test_the_readme_shows_the_model_of_the_howto():
    code = re.search(r"```python\n# src/models/mlp.py\n(.*?)```", PAGES["README.md"], re.DOTALL)[1]
    code_of_howto = FILES["src/models/mlp.py"].splitlines()
    assert set(code.splitlines()) <= set(code_of_howto)
    assert (
        "width: 64" in FILES["configs/model/mlp.yaml"]
        and "configs/model/mlp.yaml" in PAGES["README.md"]
    )


def test_the_howto_lists_every_script():
    scripts = {path.name for path in (REPOSITORY / "src").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", PAGES["howto.md"], re.MULTILINE)) == scripts


# The commands of the pages

PROGRAM = r"(?:\S+=\S+ )*(?:python src/|sbatch |srun |torchrun .*src/|make [a-z]|\.venv/bin/\w+ )"
OTHERS = {
    "source",
    "tensorboard",
    "export",
    "pip",
    ".venv/bin/pip",
    "copier",
    "sky",
    "docker",
    "uvx",
}  # programs of others
VALUES = {"<run_id>": "faster", "…": "x"}


def blocks(page: str) -> list[str]:
    """Return the lines of a page's shell blocks, continued lines joined."""
    text = "\n".join(re.findall(r"```(?:sh|bash)\n(.*?)```", PAGES[page], re.DOTALL)).replace(
        "\\\n", " "
    )
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def shown(page: str) -> list[str]:
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    inline = [code for code in re.findall(r"`([^`\n]+)`", prose) if re.match(PROGRAM, code)]
    return [*blocks(page), *(code for code in inline if "make NAME" not in code)]


def words_of(command: str) -> list[str]:
    for name, value in VALUES.items():
        command = command.replace(name, value)
    return shlex.split(command, comments=True)


def overrides_of(command: str) -> list[str] | None:
    """Return the overrides of train.py in a command, of a sweep those of its first job.

    None: no config is composed.
    """
    words = words_of(command)
    scripts = r"src/(train|rehearse|find_batch_size|doctor|check_data)\.py|launch/train\.sbatch"
    at = next((at for at, word in enumerate(words) if re.fullmatch(scripts, word)), None)
    if at is None and "src/nodes.py" in words:
        at = words.index("--")
    if at is None:
        return None
    rest = [
        word for word in words[at + 1 :] if word not in ("job", "DIR") and not word.startswith("--")
    ]
    if "-m" not in rest:
        return rest
    parsed = OverridesParser.create().parse_overrides(
        rest := [word for word in rest if word != "-m"]
    )
    return [
        f"{word.partition('=')[0]}={first_value(override)}"
        if override.is_sweep_override()
        else word
        for word, override in zip(rest, parsed)
    ]


def first_value(override) -> str:
    value = override.value()
    return (
        str(value.start)
        if hasattr(value, "start")
        else next(iter(override.sweep_string_iterator()))
    )


ALL = [(page, command) for page in PAGES for command in dict.fromkeys(shown(page))]
COMPOSED = {command: page for page, command in ALL if overrides_of(command) is not None}
QUICK = [command for command, page in COMPOSED.items() if page == "README.md"]
SLOW = [
    pytest.param(command, marks=pytest.mark.slow) for command in COMPOSED if command not in QUICK
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The yamls that the pages tell to write."""
    root = tmp_path_factory.mktemp("written")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root / "configs"


@pytest.mark.filterwarnings("ignore:(?s).*submitit_slurm:UserWarning")  # by the plugin's own schema
@pytest.mark.parametrize("command", [*QUICK, *SLOW])
def test_a_printed_command_composes(command, written):
    config = plain(
        compose("train", [*overrides_of(command), f"hydra.searchpath=['file://{written}']"])
    )
    trainer = config["trainer"]
    if "sbatch" in command and trainer["accelerator"] == "gpu":
        assert (
            "--gpus-per-node=" in command
            and "--ntasks-per-node=" in command
            and "--nodes=" in command
        )
    if "host_maddrs" in trainer:
        assert trainer["host_maddrs"], "on loopback nobody can join"
    several = isinstance(trainer["num_nodes"], int) and trainer["num_nodes"] > 1
    if several and not re.search("sbatch|torchrun|nodes.py", command):
        assert all(f"{name}=" in command for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"))


def test_every_other_command_is_a_target_a_script_or_known():
    makefiles = [REPOSITORY / "Makefile", REPOSITORY / "launch/project/Makefile"]
    targets = {
        name
        for path in makefiles
        for name in re.findall(r"^([a-z-]+):", path.read_text(), re.MULTILINE)
    }
    for page, command in ALL:
        words = [word for word in words_of(command) if not re.match(r"[A-Z_0-9]+=", word)]
        if (
            command in COMPOSED or words[0] in OTHERS or "train_script.py" in words
        ):  # test_library.py runs it
            continue
        if words[0] == "make":
            assert words[1] in targets, f"{page}: {command}"
        else:
            assert (
                words[0].endswith("python")
                and (REPOSITORY / words[-1 if words[1] == "-m" else 1]).exists()
            ), command


def test_torchrun_on_several_nodes_names_a_rendezvous():
    """Without a backend, torchrun takes every node for node 0 of a static rendezvous."""
    several = [command for _, command in ALL if command.startswith("torchrun --nnodes=")]
    assert several and all(
        "--rdzv-backend=c10d" in line and "--rdzv-endpoint=" in line for line in several
    )


# Trainings and other scripts, in a copy of the repository


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with the files that the pages tell to write, images, a table and a project of
    Lightning.
    """
    root = tmp_path_factory.mktemp("docs")
    for folder in ("src", "configs"):
        shutil.copytree(
            REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name, content in FILES.items():
        assert not (root / name).exists(), f"{name} is there already"
        (root / name).write_text(content)
    source = (REPOSITORY / "tests" / "harness" / "plain_task.py").read_text()
    (root / "src" / "my_project.py").write_text(
        f"{source}\n\nclass Model(Regression):\n    pass\n\n\nclass Data(Numbers):\n    pass\n"
    )
    rows = ["path,label,a,b,x,y,patient_id"]
    for number, folder in itertools.product(range(48), ("DIR", "photos", "data/photos")):
        path = root / folder / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (5 * number, 99, 40)).save(path)
        if folder == "DIR":
            rows.append(
                f"{path.relative_to(root)},{number % 2},1,{number % 2},{number},{number / 2},p{number}"
            )
    (root / "FILE.csv").write_text("\n".join(rows))
    for name in ("a.jpg", "b.jpg"):
        Image.new("RGB", (20, 16), (99, 99, 40)).save(root / name)
    return root


@functools.cache
def command_server():
    server = CommandServer()
    atexit.register(server.close)
    return server


def run_in(folder, command, timeout=200):
    """Run a command as it is printed, by this Python."""
    for name, value in VALUES.items():
        command = command.replace(name, value)
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if is_script(command):
        done = command_server().run(command, folder, environ)
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)  # fourteen runs
def test_the_tour_runs_from_top_to_bottom(copy):
    for command in blocks("tour.md"):
        if (
            not re.match(r"make|source", command) and "model=timm" not in command
        ):  # it downloads weights
            run_in(copy, command)
    assert (copy / "logs/train/runs/sgd/page.md").exists() and (
        copy / "logbook/faster/page.md"
    ).exists()


@pytest.mark.slow
def test_a_lightning_project_runs_step_by_step(copy):
    for command in shown("coming_from.md"):
        if "first" in command or "experiment=mine" in command:
            run_in(copy, command.replace("s3.uri=s3://bucket/prefix", ""))
    record = json.loads((copy / "logs/train/runs/first/run.json").read_text())
    assert (record["model"], record["data"], record["epochs"]) == ("Model", "Data", 5)
    page = (copy / "logs/train/runs/first/page.md").read_text()
    assert (
        "Weights: those of `my_project.Model`" in page
    )  # and not of model=, which a plain module does not use


# Tests of their own run these, or they need a network, GPUs or minutes
ELSEWHERE = ("s3://", "push_to", "nodes.py", "prove.py", "rehearse.py", "upload.py", "find_batch_size", "doctor", "…", "first",
             "=mine", "<sweep_id>", "NEW.csv", "optimizer.lr=0.003", "augmentation=none", "trainer=ddp", ",<run_id>")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_scripts_run_as_printed(copy):
    lines = [line for _, line in ALL if re.match(r"python src/(?!train)", line)]
    lines = [line for line in lines if not any(word in line for word in ELSEWHERE)]
    # Several pages print one command, with comments of their own.
    commands = list(
        dict.fromkeys(
            line.partition(" # ")[0]
            .strip()
            .replace("<run_id> <run_id>", "faster two")
            .replace("<run_id>", "faster")
            for line in lines
        )
    )
    assert len(commands) > 11
    commands.sort(
        key=lambda line: (" remove " in line, " keep " not in line)
    )  # a run is kept before it is removed
    for name in ("faster", "two"):
        if not (copy / "logs/train/runs" / name).exists():
            run_in(
                copy, f"python src/train.py experiment=quickstart trainer.max_steps=2 run_id={name}"
            )
    for command in commands:
        run_in(copy, command)


@pytest.mark.slow
def test_each_component_that_the_howto_adds_works(copy):
    own = ("model=mlp", "loss=logit_adjusted", "worst_class", "augmentation=coarse", "weight_norm")
    own += ("data=squares", "trainer=signs")
    commands = [
        line
        for line in (*blocks("howto.md"), *blocks("data.md"))
        if any(word in line for word in own)
    ]
    assert len(commands) == 7, commands
    for command in commands:
        run_in(copy, f"{command} trainer.max_steps=2")
    (early,) = set(re.findall(r"`'(\+callbacks\.early=\{.*?\})'`", PAGES["howto.md"]))
    run_in(
        copy,
        f"python src/train.py experiment=squares trainer=fsdp_sim '{early}' run_id=r trainer.log_every_n_steps=3",
    )
    folder = copy / "logs" / "train" / "runs" / "r"
    record = json.loads((folder / "run.json").read_text())
    assert (record["model"], record["data"], record["experiment"]) == ("mlp", "squares", "squares")
    assert (record["images"]["augmentation"], record["images"]["path"]) == ("coarse", "array")
    assert record["metrics"]["test/images"] == 100 and record["metrics"]["test/acc"] > 0.95
    assert (
        record["metrics"]["test/worst_class"] > 0.9
        and record["num_parameters"] == 64 * 16 + 16 + 16 * 2 + 2
    )
    assert "losses.logit_adjusted.LogitAdjusted" in (folder / "config.yaml").read_text()
    assert "train/weight_norm" in (folder / "metrics.csv").read_text().splitlines()[0]
    evaluated = run_in(copy, "python src/eval.py ckpt_path=r")
    assert f"test/acc {record['metrics']['test/acc']:.10g}" in evaluated.stdout


@pytest.mark.slow
def test_a_data_config_of_a_class_alone_trains(copy):
    config = "# Squares\n_target_: data.squares.SquaresDataModule\n"
    (copy / "configs/data/bare_squares.yaml").write_text(config)
    command = "python src/train.py data=bare_squares model=small_cnn trainer=cpu trainer.max_steps=2 run_id=bare"
    trained = run_in(copy, command)
    assert "bare_squares" in trained.stdout and "global batch 128" in trained.stdout
    evaluated = run_in(copy, "python src/eval.py ckpt_path=bare")
    assert "batches of 512" in evaluated.stdout and "test/images 100" in evaluated.stdout


@pytest.mark.slow
def test_the_sources_and_the_task_of_the_pages_train(copy):
    """Photographs that a yaml names, the lines that pack them into shards, and a task of one's own
    on a table.
    """
    short = "trainer=cpu trainer.max_epochs=1"
    small = f"data.image_size=16 data.global_batch_size=4 {short}"
    run_in(copy, f"{one('data.md', 'data=photos')} {small} 'metrics=[f1,kappa]' run_id=photos")
    record = json.loads((copy / "logs/train/runs/photos/run.json").read_text())
    assert (record["data"], record["num_train"] + record["num_val"] + record["num_test"]) == (
        "photos",
        48,
    )
    assert {"val/f1", "val/kappa", "test/f1", "test/kappa"} <= record["metrics"].keys()
    assert any(path.name.startswith("photos-") for path in (copy / "data/cache").iterdir())
    (lines,) = re.findall(r"```python\n(import io\n.*?)```", PAGES["data.md"], re.DOTALL)
    run_in(copy, f"python -c {shlex.quote(lines)}")
    packed = run_in(
        copy, f"python src/train.py data=webdataset data.root=shards model=small_cnn {small}"
    )
    assert "2 classes: 0, 1" in packed.stdout
    run_in(copy, f"{one('tasks.md', 'task=center')} data.global_batch_size=4 {short} run_id=center")
    assert (
        json.loads((copy / "logs/train/runs/center/run.json").read_text())["monitor"]
        == "val/distance"
    )
    for task in ("multilabel", "regression"):
        run_in(copy, f"{one('tasks.md', f'task={task}')} {small}")


def one(page, words):
    (command,) = {command for command in blocks(page) if re.search(rf"{words}\b", command)}
    return command.partition(" #")[0]


@pytest.mark.slow
def test_the_notebook_runs_after_a_quickstart(copy, tmp_path):
    run_in(
        copy,
        "python src/train.py experiment=quickstart trainer.max_epochs=1 run_id=quickstart logbook=keep",
    )
    cells = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code += "\nprint(*map(tuple, (images.shape, labels.shape, logits.shape)), len(model.facts['class_names']))"
    code += "\nprint(metrics.num_rows, metrics['step'].to_pylist(), accuracy['quickstart'] > 0)"
    path = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not any(tmp_path.iterdir())
    assert done.stdout == "(64, 1, 8, 8) (64,) (64, 10) 10\n1 [20] True\n", (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_the_files_pass_the_checks_of_a_project(copy):
    """`make check` of whoever copies them."""
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    written = " ".join(
        name for name in FILES if name.endswith(".py") and "center" not in name
    )  # it has no annotations
    for tool in ("mypy", "ruff check", "ruff format --check"):
        run_in(copy, f"python -m {tool} {written}")

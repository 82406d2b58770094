"""The documents name every option, and what they show composes."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lockstep.config.compose import compose, plain
from lockstep.config.help import groups, help_text, keys
from lockstep.config.instantiate import build

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
README = (REPOSITORY / "README.md").read_text()
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def test_options_page_is_up_to_date():
    page = runpy.run_path(str(REPOSITORY / "docs" / "make_options.py"))["options_page"](CONFIGS)
    assert (REPOSITORY / "docs" / "options.md").read_text() == page, "make docs"


def test_the_schema_of_the_record_is_up_to_date():
    text = runpy.run_path(str(REPOSITORY / "docs" / "make_schema.py"))["schema_text"]()
    assert (REPOSITORY / "docs" / "run.schema.json").read_text() == text, "make docs"


def test_every_config_is_as_its_schema_says_and_a_wrong_key_or_value_is_not():
    made = runpy.run_path(str(REPOSITORY / "docs" / "make_config_schema.py"))["schemas"](CONFIGS)
    folder = REPOSITORY / "docs" / "schemas"
    assert {path.name: path.read_text() for path in folder.iterdir()} == made, "make docs"
    mapped = json.loads((REPOSITORY / ".vscode" / "settings.json").read_text())["yaml.schemas"]
    of_all = mapped.pop("./docs/schemas/train.json")
    assert mapped == {f"./docs/schemas/{name}": f"configs/{name[:-5]}/*.yaml" for name in made if name != "train.json"}
    for path in CONFIGS.glob("*/*.yaml"):
        if f"{path.parent.name}.json" in made:
            schema = json.loads(made[f"{path.parent.name}.json"])
            assert list(faults(yaml.safe_load(path.read_text()) or {}, schema, {}, path.stem)) == []
    for path in (path for pattern in of_all for path in REPOSITORY.glob(pattern)):
        found = faults(yaml.safe_load(path.read_text()) or {}, json.loads(made["train.json"]), {}, path.stem)
        assert list(found) == []
    recipe = {"trainr": {}, "data": {"flip": 3, "batch_size": 8}, "optimizer": {"lr": 0.1}}
    assert list(faults(recipe, json.loads(made["train.json"]), {})) == [
        "record.trainr is not known", "record.data.flip is 3, not ['boolean', 'null']",
        "record.data.batch_size is not known",
    ]  # fmt: skip
    optimizer = json.loads(made["optimizer.json"])
    assert list(faults({"lr": "fast", "learning_rate": 1}, optimizer, {})) == [
        "record.lr is 'fast', not ['number', 'null']", "record.learning_rate is not known",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a_first", "z_last"])
def test_a_yaml_of_few_keys_weakens_no_schema(name, tmp_path):
    """What it leaves to its class, others say."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    mine = "# Mine\n_target_: lockstep.data.augmentation.CropFlip\nmixup_alpha: 0.0\nstrength: 3  # of mine\n"
    (tmp_path / "configs/augmentation" / f"{name}.yaml").write_text(mine)
    schemas = runpy.run_path(str(REPOSITORY / "docs" / "make_config_schema.py"))["schemas"]
    before, after = (json.loads(schemas(configs)["augmentation.json"]) for configs in (CONFIGS, tmp_path / "configs"))
    assert after["properties"].pop("strength")["description"] == "of mine"
    assert after == before and "anyOf" in before["properties"]["erasing_prob"]


TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def faults(value, schema, definitions, place="record"):
    """What of `value` is not as the schema says; the part of JSON Schema that ours uses."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        each = [list(faults(value, option, definitions, place)) for option in schema["anyOf"]]
        yield from min(each, key=len)
        return
    names = schema.get("type", [])
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{place} is {value!r}, not as {schema['pattern']!r}"
    if "type" in schema and not any(is_of_type(value, name) for name in ([names] if isinstance(names, str) else names)):
        yield f"{place} is {value!r}, not {names}"
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is False:
                yield f"{place}.{key} is not known"
            yield from faults(item, inner, definitions, f"{place}.{key}") if isinstance(inner, dict) and inner else ()
    elif isinstance(value, list):
        for item in value if "items" in schema else ():
            yield from faults(item, schema["items"], definitions, f"{place}[]")


def is_of_type(value, name):
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def test_the_records_of_the_logbook_are_as_the_schema_says():
    schema = json.loads((REPOSITORY / "docs" / "run.schema.json").read_text())
    records = [json.loads(path.read_text())["record"] for path in (REPOSITORY / "logbook/runs").glob("*.json")]
    assert len(records) > 20
    for record in records:
        assert list(faults(record, schema, schema["$defs"])) == []
        assert set(record) <= set(schema["properties"]), "a field that the schema does not name"
    damaged = {**records[0], "steps": "abc", "restarts": [{"lost_steps": 0.5}], "code": 3}
    assert len(list(faults(damaged, schema, schema["$defs"]))) == 3


def test_every_option_has_a_description_and_every_key_a_comment():
    for group, options in groups(CONFIGS).items():
        for option in options:
            assert option.description, f"{group}={option.name}"
    named = {key.name for key in keys(CONFIGS / "trainer" / "default.yaml", "trainer")}
    assert {"trainer.max_epochs", "trainer.devices", "trainer.accumulate_grad_batches"} <= named


def test_help_lists_every_option():
    text = help_text(CONFIGS, "train", "what it does")
    for group, options in groups(CONFIGS).items():
        if group not in ("hydra", "paths"):
            assert f"{group}=" in text
            assert all(f" {option.name} " in text for option in options)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = plain(compose("train", [f"experiment={experiment}"]))
    assert config["experiment_name"] == experiment
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    assert "Source" in text and "Command" in text
    shape = {"num_classes": 10, "image_size": config["data"]["image_size"], "channels": 3}
    own = dict(config["model"])
    own |= {key: value for key, value in {"pretrained": False, "weights": None}.items() if key in own}
    own.pop("freeze")  # said of every model, and not to the model
    with torch.device("meta"):
        build(own, shape)


def shown_commands() -> list[str]:
    """Of README, docs, the heads of experiments, and what people wrote on the logbook's pages."""
    pages = [README, *(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))]
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", "\n".join(pages), re.DOTALL)
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        lines = [line.lstrip("# ").replace("Command: ", "") for line in path.read_text().splitlines()]
        blocks.append("\n".join(line.split("   ")[0] for line in lines))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.split(" #")[0].strip() for line in lines]
    for path in [REPOSITORY / "docs" / "recipes.md", *(REPOSITORY / "logbook" / "notes").rglob("*.md")]:
        found += re.findall(r"`([^`]+)`", path.read_text())
    return trainings(found)


def trainings(lines) -> list[str]:
    return sorted({line for line in lines if re.search(r"(src/train\.py|train\.sbatch) ", line)})


def config_of(command: str):
    words = re.split(r"src/train\.py|train\.sbatch", command, maxsplit=1)[1].split()
    overrides = [word.strip("'\"") for word in words if "=" in word and "hydra" not in word and "(" not in word]
    overrides = [re.sub(r"<[^>]*>", "x", word).split(",")[0] if "[" not in word else word for word in overrides]
    return plain(compose("train", [re.sub(r"<[^>]*>", "x", word) for word in overrides]))


COMING_FROM = trainings(re.findall(r"`([^`]+)`", (REPOSITORY / "docs" / "coming_from.md").read_text()))
SLOW = [pytest.param(command, marks=pytest.mark.slow) for command in COMING_FROM]


@pytest.mark.parametrize("command", [*shown_commands(), *SLOW])
def test_every_command_that_is_shown_composes_and_says_what_its_launcher_needs(command):
    config = config_of(re.sub(r"<[^>]*>", "x", command))
    trainer = config["trainer"]
    if "sbatch" in command and trainer["accelerator"] == "gpu":
        assert "--gpus-per-node=" in command and "--ntasks-per-node=" in command and "--nodes=" in command
    if "host_maddrs" in trainer:
        assert trainer["host_maddrs"], "on loopback nobody can join"
    several = isinstance(trainer["num_nodes"], int) and trainer["num_nodes"] > 1
    if several and not re.search("sbatch|torchrun|nodes.py", command):
        assert all(f"{name}=" in command for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"))


def test_commands_are_found_everywhere():
    found = "\n".join(shown_commands())
    wanted = ("launch/train.sbatch experiment=alexnet_cifar10", "experiment=vit_hivemind", "torchrun", "NODE_RANK=")
    assert len(found.splitlines()) > 30 and all(words in found for words in wanted)


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_torchrun_on_several_nodes_names_a_rendezvous():
    """Without a backend, torchrun takes every node for node 0 of a static rendezvous."""
    several = [line for line in shown_commands() if line.startswith("torchrun --nnodes=")]
    assert several and all("--rdzv-backend=c10d" in line and "--rdzv-endpoint=" in line for line in several)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))])
def test_every_link_of_a_page_leads_to_a_file_and_its_anchor(page):
    path = REPOSITORY / page
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in link or not name:
            continue
        target = path.parent / name
        assert target.exists(), link
        assert not anchor or f'id="{anchor}"' in target.read_text() or anchor in headings(target), link


def headings(path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_strategies_md_names_every_trainer_that_there_is():
    text = (REPOSITORY / "docs" / "strategies.md").read_text()
    trainers = {path.stem for path in (CONFIGS / "trainer").glob("*.yaml")} - {"default"}
    assert {name for name in trainers if f"trainer={name}" not in text and f"={name}`" not in text} == set()

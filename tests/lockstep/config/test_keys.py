"""The table of keys: the kind of an option, and no list of options in another file."""

import ast
from pathlib import Path

import pytest

from lockstep.config import keys, schema
from lockstep.config.compose import CONFIGS

SRC = Path(keys.__file__).parents[2]
NAMES = {
    *(key.name for key in schema.keys_in_yaml(CONFIGS / "train.yaml", commented=False)),
    *(
        key.name
        for group, options in schema.read_groups(CONFIGS).items()
        for option in options
        for key in schema.keys_in_yaml(option.path, group, commented=False)
    ),
}
# A group's name alone is the name of a folder too.
LISTED = {name for name in NAMES if "." in name or not (CONFIGS / name).is_dir()}


def literal_keys(node):
    """Return the config keys that a literal tuple, list, set or dict of them holds."""
    if isinstance(node, ast.Dict):
        items = node.keys
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = node.elts
    else:
        return []
    texts = [item.value for item in items if isinstance(item, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.lstrip("+~") in LISTED]


def lists_of(path):
    """Return the lists of two or more keys in a file, each with the name that it is assigned to."""
    tree = ast.parse(path.read_text())
    named = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef):
            named.update(dict.fromkeys(ast.walk(statement), statement.name))
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and statement.value:
                named.update(dict.fromkeys(ast.walk(statement.value), target.id))
    lists = [(node, literal_keys(node)) for node in ast.walk(tree)]
    return {
        (named.get(node, f"line {node.lineno}"), tuple(found))
        for node, found in lists
        if len(found) > 1
    }


# These lists are no facts about kinds of keys.
ELSEWHERE = {
    ("eval.py", "evaluation_config"): "the values of one evaluation",
    ("eval.py", "inherited_config"): "the labels of one evaluation",
    ("eval.py", "size_is_named"): "which options say the size of the images",
    ("lockstep/config/foreign.py", "NAMES"): "the boundary says itself what it lets in",
    ("lockstep/config/foreign.py", "RUN_ROOTS"): "the boundary says itself what it lets in",
    (
        "lockstep/config/overrides.py",
        "SHORT_RUN_OVERRIDES",
    ): "the overrides of a run of a few steps",
    ("lockstep/config/suggestions.py", "NAMES_ELSEWHERE"): "names from other programs",
    ("lockstep/runs/batch_search.py", "changes"): "the overrides of a search's trial",
    ("lockstep/runs/proof.py", "FIXED_OPTIONS"): "the overrides of a proof",
    ("lockstep/records/folder.py", "MAPPING_GROUPS"): "the nodes of a config that is read",
    ("lockstep/runs/checks.py", "CPU_CHOICES"): "what makes a training on a CPU a choice",
    ("lockstep/runs/first_record.py", "_identity"): "fields of the record",
    ("lockstep/sweeps/jobs.py", "overrides_of_job"): "the overrides of a job",
    ("predict.py", "OPTIONS"): "the options of a script that composes no config",
    ("rehearse.py", "FIXED"): "the overrides of a dry run",
    ("rehearse.py", "changes"): "the overrides of a dry run",
    ("rehearse.py", "options"): "the overrides of a dry run",
    ("upload.py", "OPTIONS"): "the options of a script",
}


def test_no_other_file_keeps_a_list_of_options():
    lists = {
        (str(path.relative_to(SRC)), name): found
        for path in SRC.rglob("*.py")
        for name, found in lists_of(path)
        if path != Path(keys.__file__)
    }
    assert {place: found for place, found in lists.items() if place not in ELSEWHERE} == {}
    assert ELSEWHERE.keys() - lists.keys() == set(), "an exception that is no longer needed"


def test_a_list_of_options_is_seen(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("MINE = {'data.root', 'seed'}\n")
    assert lists_of(file) == {("MINE", ("data.root", "seed"))}


def test_every_pattern_of_the_table_matches_an_option():
    others = {
        "data.*download_dir": "older configs",
        "hydra": "Hydra's own",
        "hydra.searchpath": "Hydra's own",
        "initial_weights": "older configs",
        "overrides": "every stored config",
        "resume_step": "older configs",
        "data.*.root": "arguments of a Dataset",
        "trainer.overfit_batches": "an argument of Lightning's Trainer",
        "trainer.reload_dataloaders_every_n_epochs": "an argument of Lightning's Trainer",
        "trainer.use_distributed_sampler": "an argument of Lightning's Trainer",
    }
    unused = [p for p in keys.KIND_BY_PATTERN if not any(keys.is_below(name, p) for name in NAMES)]
    assert set(unused) <= others.keys()


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("optimizer.lr", keys.RECIPE),
        ("no.such.key", keys.RECIPE),
        ("trainer.precision", keys.EXECUTION),
        ("trainer.strategy.static_graph", keys.EXECUTION),
        ("trainer.strategy.initial_peers", keys.PLACE),
        ("trainer.ema_decay", keys.RECIPE),
        ("trainer.devices", keys.MACHINE),
        ("data.root", keys.PLACE),
        ("data.val_dataset.root", keys.PLACE),
        ("data.rooted", keys.RECIPE),
        ("s3.uri", keys.PLACE),
        ("verbose", keys.START),
        ("callbacks.early.patience", keys.OUTPUT),
    ],
)
def test_the_longest_pattern_counts(key, kind):
    assert keys.kind_of(key) is kind

"""An option that a resume changes is refused, or it takes effect: there is no third case."""

import copy
import doctest
import functools

import pytest

from lockstep.config import keys, merge, schema
from lockstep.config.changes import changes_of
from lockstep.config.compose import CONFIGS, compose, defaults_of, whole_config
from lockstep.process.errors import UserError
from lockstep.records.config import flatten
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord
from lockstep.runs import resume

# A resume may change these options of a group whose other options stay.
MAY_CHANGE = {
    "data": {"root", "images", "cache_dir", "num_workers", "path", "eval_batch_size"},
    "model": {"weights"},
    "task": {"log_dir"},
    # It is of no effect by itself: the rates that it scales are compared.
    "optimizer": {"scale_lr_with_batch"},
}
MUST_STAY = {"ema_decay", "limit_train_batches"}
DEFAULTS = {
    "data": "cifar10",
    "augmentation": "crop_flip",
    "task": "classifier",
    "model": "vit",
    "loss": "cross_entropy",
    "optimizer": "adamw",
    "scheduler": "cosine",
    "trainer": "default",
}
OPTIONS = [
    pytest.param(
        group, option.name, marks=[] if DEFAULTS[group] == option.name else pytest.mark.slow
    )
    for group in DEFAULTS
    for option in schema.read_groups(CONFIGS)[group]
    if option.name not in ("default", "none") or DEFAULTS[group] == option.name
]


@functools.cache
def composed(*words):
    return whole_config(compose("train", list(words)))


def is_refused(monkeypatch, before, now):
    """Return whether a resume of a run with the config `before` is refused as another run."""
    monkeypatch.setattr(resume, "read_earlier_config", lambda folder: before)
    try:
        resume.check_resumable(RunFolder(CONFIGS / "nowhere"), now, RunRecord())
    except UserError as refusal:
        assert "resume it with the same options, or start a new run with ckpt_path=" in str(refusal)
        return True
    return False


def with_value(config, key, value, word):
    """Return the config with another value of a key, and the override that says so."""
    changed = copy.deepcopy(config)
    *parents, name = key.split(".")
    node = changed
    for parent in parents:
        node = node[parent]
    if word.startswith("~"):
        del node[name]
    else:
        node[name] = value
    changed["overrides"].append(word)
    return changed


def may_change(key):
    group, _, name = key.partition(".")
    if group == "trainer":
        return name not in MUST_STAY
    return name in MAY_CHANGE.get(group, ())


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_each_option_of_a_group_is_refused_or_may_change(group, option, monkeypatch):
    before = copy.deepcopy(composed(f"{group}={option}"))
    if "weights" in before["model"]:
        # Another file of weights may be given; weights where there were none are refused.
        before["model"]["weights"] = "net.pth"
    for key, value in flatten(before[group], group).items():
        another = value + 1 if type(value) in (int, float) else "1h"
        other = with_value(before, key, another, f"{key}={another}")
        assert is_refused(monkeypatch, before, other) != may_change(key), key
        if value is not None and group != "trainer" and key != "model.weights":
            without = with_value(before, key, None, f"~{key}")
            assert is_refused(monkeypatch, before, without) != may_change(key), f"~{key}"
    added = with_value(before, f"{group}.eps", 1e-4, f"+{group}.eps=1e-4")
    assert (
        is_refused(monkeypatch, before, added)
        == is_refused(monkeypatch, added, before)
        == (group != "trainer")
    )


@pytest.mark.parametrize(
    "word", ["scheduler=none", "scheduler=linear", "seed=1", "loss=focal", "optimizer=sgd"]
)
def test_another_option_of_a_group_is_refused(word, monkeypatch):
    assert is_refused(monkeypatch, composed(), composed(word))


@pytest.mark.parametrize(
    "word",
    [
        "trainer=ddp",
        "trainer.precision=64-true",
        "metrics=f1",
        "trainer.gradient_clip_val=2",
    ],
)
def test_how_a_run_is_computed_may_change_and_is_logged(word, monkeypatch, capsys):
    assert not is_refused(monkeypatch, composed(), composed(word))
    said = capsys.readouterr().out
    assert "Changed from here on" in said
    assert word.partition("=")[0] in said


def test_more_epochs_stretch_the_schedule_and_say_so(monkeypatch, capsys):
    before, now = (whole_config(compose("train", [f"trainer.max_epochs={n}"])) for n in (3, 4))
    assert not is_refused(monkeypatch, before, now)
    assert (
        "trainer.max_epochs was 3, now 4: a schedule of scheduler= is stretched"
        in capsys.readouterr().out
    )


def test_a_schedule_of_torch_is_not_said_to_be_stretched(monkeypatch, capsys):
    torch_schedule = ["scheduler._target_=torch.optim.lr_scheduler.ConstantLR"]
    before, now = (
        whole_config(compose("train", [*torch_schedule, f"trainer.max_epochs={n}"])) for n in (3, 4)
    )
    assert not is_refused(monkeypatch, before, now)
    assert "stretched" not in capsys.readouterr().out


def test_a_key_of_another_version_is_no_change():
    now = copy.deepcopy(composed())
    before = copy.deepcopy(now)
    # This version has new keys with a default, one of them derived, and a whole new group.
    del before["data"]["crop_padding"], before["data"]["seed"], before["loss"]
    now["data"]["seed"] = 7
    # The other version had a key that is gone.
    before["data"]["verify"] = True
    assert changes_of(before, now, defaults_of) == []


def test_a_new_key_without_its_default_is_a_change():
    now = whole_config(compose("train", ["data.crop_padding=9"]))
    before = copy.deepcopy(now)
    del before["data"]["crop_padding"]
    [change] = changes_of(before, now, defaults_of)
    assert (change.key, str(change)) == ("data.crop_padding", "was not set, now 9")


def test_no_key_counts_that_neither_recipe_nor_execution_has():
    before = composed()
    now = copy.deepcopy(before)
    now.update(
        tags=["a"],
        verbose=True,
        paths={},
        callbacks={},
        s3={"uri": "s3://a/b"},
        choices={"model": "x"},
    )
    assert changes_of(before, now, defaults_of) == []
    assert keys.kind_of("choices.model") is keys.RECIPE, "comparisons of runs show the choices"


def test_the_example_of_a_merge_holds():
    folders = (CONFIGS,)
    results = doctest.testmod(merge, extraglobs={"folders": folders})
    assert results.attempted > 5 and not results.failed

"""What a run's one file in the logbook holds."""

import json

import pytest

from example_runs import example_config, write_run
from lockstep.pages.source import REPOSITORY, cleaned, differences, flatten, import_run, read_source, write_if_changed


def test_changed_keys_are_those_that_differ_from_the_defaults(tmp_path):
    source = import_run(write_run(tmp_path, "run-1", config=example_config(trainer__strategy="fsdp")))
    assert source["changed"] == {
        "optimizer.lr": [0.001, 0.0005],
        "trainer.devices": [1, 2],
        "trainer.strategy": [None, "fsdp"],
    }


def test_a_run_folder_without_defaults_says_so(tmp_path):
    folder = write_run(tmp_path, "run-1")
    (folder / "defaults.yaml").unlink()
    assert import_run(folder)["changed"] is None


def test_paths_and_names_are_not_compared():
    before, after = {"run_id": "a", "paths.log_dir": "/x", "seed": 1}, {"run_id": "b", "paths.log_dir": "/y", "seed": 2}
    assert differences(before, after) == {"seed": [1, 2]}


def test_a_class_that_moved_to_another_module_is_no_difference():
    before = {"data._target_": "src.cifar10.CIFAR10", "model._target_": "models.vit.ViT", "model.name": "a.vit"}
    after = {"data._target_": "data.cifar10.CIFAR10", "model._target_": "models.vit.CNN", "model.name": "b.vit"}
    assert [*differences(before, after)] == ["model._target_", "model.name"]


def test_flatten_keeps_lists_and_empty_groups():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {"a.b": [1, {"c": 2}], "a.d": {}, "e": None}


def test_a_yaml_tag_builds_nothing(tmp_path):
    folder = write_run(tmp_path, "run-1")
    (folder / "config.yaml").write_text("a: !!python/object/apply:os.system ['touch /tmp/never']\n")
    assert import_run(folder)["config"] == {}


@pytest.mark.parametrize("run_id", ["../../etc/x", "a/b", "", None, 5, ".."])
def test_a_run_id_cannot_leave_the_logbook(tmp_path, run_id):
    folder = write_run(tmp_path, "run-1")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "run_id": run_id}))
    assert import_run(folder)["run_id"] == "run-1"


def test_long_texts_and_diffs_are_cut_and_say_so(tmp_path):
    folder = write_run(tmp_path, "run-1", error={"message": "x" * 9000})
    (folder / "code.diff").write_text("+line\n" * 30_000)
    source = import_run(folder)
    assert len(source["record"]["error"]["message"]) == 4001
    assert len(source["code_diff"]) < 61_000 and source["code_diff"].endswith("more characters in code.diff")


def test_a_secret_that_the_cut_would_halve_is_found_before_it(tmp_path):
    secret = "AKIAIOSFODNN7EXAMPLE"
    folder = write_run(tmp_path, "run-1", error={"message": "x" * 3989 + " " + secret})
    assert "AKIA" not in import_run(folder)["record"]["error"]["message"]


def test_where_the_clone_lies_is_nobody_s_business(tmp_path):
    config = example_config(data__cache_dir=str(REPOSITORY / "data" / "cache"), data__root=str(REPOSITORY))
    folder = write_run(tmp_path, "run-1", config=config, error={"message": f"{REPOSITORY}/src/train.py broke"})
    source = import_run(folder)
    assert (source["config"]["data.cache_dir"], source["config"]["data.root"]) == ("data/cache", ".")
    assert source["record"]["error"]["message"] == "src/train.py broke"


def test_the_file_name_decides_the_run_id(tmp_path):
    (tmp_path / "run-7.json").write_text('{"run_id": "../x", "record": {}}')
    assert read_source(tmp_path / "run-7.json")["run_id"] == "run-7"


def test_an_equal_file_is_left_alone(tmp_path):
    assert write_if_changed(tmp_path / "a" / "f", "x") and not write_if_changed(tmp_path / "a" / "f", "x")
    assert write_if_changed(tmp_path / "a" / "f", "y", kept=False) and (tmp_path / "a" / "f").read_text() == "y"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["f"]


def test_where_this_clone_lies_is_cut_and_a_folder_whose_name_only_begins_so_is_not():
    here = str(REPOSITORY)
    assert cleaned(f"{here}/src/a.py in {here}, {here}_data/b, {here}-2.") == f"src/a.py in ., {here}_data/b, {here}-2."

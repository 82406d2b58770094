"""Runs of version 1, whose config has `classifier:` in place of `task:`, resume and evaluate."""

import pytest
import yaml

from lockstep.runs.folder import read_config
from runs import succeed

OLD = {"_target_": "classifier.ImageClassifier", "label_smoothing": 0.1, "test_time_flip": False}


@pytest.mark.slow
def test_a_run_whose_config_names_the_classifier_resumes_and_evaluates(tmp_path):
    words = ["experiment=quickstart", "trainer.max_epochs=1", "trainer.num_threads=1", "task.label_smoothing=0.1"]
    done = succeed("train", *words, "run_id=r", logs=tmp_path)
    config = read_config(done.folder.config)
    del config["task"], config["choices"]["task"]
    config["callbacks"]["throughput"] = {"_target_": "lockstep.callbacks.throughput.Throughput"}
    config["overrides"] = ["classifier.label_smoothing=0.1", *config["overrides"][:3]]
    done.folder.config.write_text(yaml.safe_dump({**config, "classifier": OLD}))
    evaluated = succeed("eval", "ckpt_path=r", logs=tmp_path)
    assert evaluated.record["metrics"]["test/acc"] == done.record["metrics"]["test/acc"]
    resumed = succeed("train", "resume=r", "trainer.max_epochs=2", logs=tmp_path)
    assert resumed.record["steps"] == 40, resumed.output
    now = read_config(resumed.folder.config)
    assert now["task"]["_target_"] == "tasks.classifier.ImageClassifier" and now["loss"]["label_smoothing"] == 0.1
    assert "task.label_smoothing=0.1" in now["overrides"] and "classifier" not in now

"""Thirteen secrets in all the places where people keep them: none of them in a file, event, page,
object, line or
process list that a run leaves. Each is a canary that no form gives away."""

import json
import logging
from pathlib import Path

import psutil
import pytest

from object_store import IDENTITIES, shared_store
from runs import run_script, start_script

SMALL = ["data=synthetic", "data.num_images=400", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer=ddp_sim", "trainer.num_threads=1", "trainer.max_epochs=2"]  # fmt: skip
CANARIES = [f"canary-{number:02d}-zqxjkvbw" for number in range(14)]
KEY_ID, SECRET, _ = IDENTITIES["ci"]


def environment_full_of_secrets(home: Path) -> dict[str, str]:
    """The first is the one that the store really checks."""
    held = {
        ".aws/credentials": f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
        f"[other]\naws_access_key_id = AKIAOTHER\naws_secret_access_key = {CANARIES[1]}\n",
        ".aws/config": f"[default]\nregion = us-east-1\n[profile x]\nexternal_id = {CANARIES[2]}\n",
        ".netrc": f"machine 127.0.0.1 login u password {CANARIES[3]}\n",
        ".git-credentials": f"https://u:{CANARIES[4]}@github.com\n",
    }
    (home / ".aws").mkdir(parents=True)
    for name, text in held.items():
        (home / name).write_text(text)
    return {
        "HOME": str(home), "AWS_SHARED_CREDENTIALS_FILE": str(home / ".aws/credentials"),
        "AWS_CONFIG_FILE": str(home / ".aws/config"), "AWS_EC2_METADATA_DISABLED": "true",
        "HF_TOKEN": CANARIES[5], "WANDB_API_KEY": CANARIES[6], "DATABASE_URL": f"postgres://u:{CANARIES[7]}@db/x",
        "HTTPS_PROXY": f"http://u:{CANARIES[8]}@127.0.0.1:9", "PASSWORD": CANARIES[9], "LOCKSTEP_SECRET": CANARIES[13],
    }  # fmt: skip


def everything_in(folder: Path) -> str:
    return "\n".join(
        path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()
    )


def objects(store, bucket) -> str:
    client, text = store.client(), ""
    for entry in client.list_objects_v2(Bucket=bucket)["Contents"]:
        found = client.get_object(Bucket=bucket, Key=entry["Key"])
        text += (
            entry["Key"] + json.dumps(found["Metadata"]) + found["Body"].read().decode("latin-1")
        )
    return text


def hits(text):
    return [secret for secret in [SECRET, *CANARIES] if secret in text]


@pytest.mark.slow
def test_secrets_of_the_environment_and_the_home_go_nowhere(tmp_path):
    store, logs = shared_store(), tmp_path / "logs"
    bucket, environment = store.new_bucket(), environment_full_of_secrets(tmp_path / "home")
    words = [*SMALL, f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}", "run_id=r"]
    started = start_script("train", *words, logs=logs, environment=environment)
    started.wait_for(lambda: any(logs.rglob("*.ckpt.json")))
    parent = psutil.Process(started.process.pid)
    processes = "".join(
        " ".join(each.cmdline()) for each in [parent, *parent.children(recursive=True)]
    )
    done = started.done()
    assert done.code == 0, done.output
    assert hits(done.output + processes + everything_in(logs) + objects(store, bucket)) == []


def raises_with_locals():
    """A callback whose frame holds a secret fails, quoting a request that holds others."""
    from lockstep.callbacks.run_recorder import RunRecorder

    def fails(self, *_):
        password = CANARIES[10]
        raise OSError(
            f"GET https://u:{CANARIES[11]}@host/x?X-Amz-Signature={CANARIES[12]}&a=1 failed{password[:0]}"
        )

    RunRecorder.on_train_batch_end = fails


@pytest.mark.slow
def test_a_traceback_tells_no_secret(tmp_path):
    done = run_script("train", *SMALL, "run_id=r", logs=tmp_path, before=raises_with_locals)
    assert done.code == 1 and "GET https://" in done.record["error"]["message"]
    assert "Traceback" in done.output + everything_in(done.folder.path)
    assert hits(done.output + everything_in(tmp_path)) == []


OVERRIDES = {
    f"+data.password={CANARIES[1]}": "data.password holds a secret",
    f"+notes.api_key={CANARIES[1]}": "no notes",
    f"data.root=https://u:{CANARIES[1]}@host/x": "data.root holds credentials",
    f"data.root='https://h/x?X-Amz-Signature={CANARIES[1]}'": "data.root holds credentials",
    "tags=[ghp_abcdefghijklmnopqrstuvwxyz0123]": "tags holds a token or key",
    f"s3.uri=s3://key:{CANARIES[1]}@bucket/x": "credentials",
    f"s3.secret_key={CANARIES[1]}": "s3.secret_key",
    f"data.nothing=https://u:{CANARIES[1]}@host/x": "nothing",
}


@pytest.mark.parametrize("word", OVERRIDES)
def test_an_override_with_a_secret_is_refused_and_not_repeated(word, tmp_path, capfd, monkeypatch):
    from train import main

    # Of other tests in this process
    monkeypatch.setattr(logging.root, "handlers", [])
    assert main(["data=cifar10", word, f"paths.log_dir={tmp_path}"]) == 2
    output = "".join(capfd.readouterr())
    assert OVERRIDES[word] in output and "Traceback" not in output and "ghp_" not in output
    assert hits(output + everything_in(tmp_path)) == []


def test_uncommitted_code_is_kept_without_secrets(tmp_path):
    done = run_script(
        "train", *SMALL, "trainer=cpu", "trainer.max_epochs=1", logs=tmp_path, before=_dirty
    )
    diff = done.folder.code_diff.read_text()
    assert "+x = 1" in diff and hits(diff) == []


def _dirty():
    from lockstep.records import provenance

    provenance.code_diff = lambda _: f"+password = '{CANARIES[1]}'\n+x = 1\n"
    provenance.code_state = lambda _: {"commit": "c", "dirty": True}

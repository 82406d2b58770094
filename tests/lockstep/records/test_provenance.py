"""Which code ran, and that no secret is written down."""

import os
import subprocess
import sys

import pytest

from lockstep.process.environment import (
    available_cores,
    available_memory,
    count_visible_gpus,
    network_interface,
)
from lockstep.process.errors import UserError
from lockstep.process.redact import REDACTED, redact, redact_diff, redact_text, refuse_secrets
from lockstep.records import provenance


def git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        check=True,
    )


@pytest.fixture
def repository(tmp_path):
    """A committed clone in small: code, a page of the logbook, a file that git ignores."""
    for name in ("src/a.py", "configs/a.yaml", "logbook/README.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def test_a_page_of_the_logbook_makes_no_run_dirty(repository):
    clean = provenance.code_state(repository)
    assert clean["dirty"] is False and len(clean["commit"]) == 40
    (repository / "logbook" / "README.md").write_text("another run\n")
    (repository / "logbook" / "new.md").write_text("a page\n")
    (repository / "src" / "a.pyc").write_text("compiled")
    assert provenance.code_state(repository) == clean and provenance.code_diff(repository) == ""
    (repository / "configs" / "b.yaml").write_text("x: 1\n")
    # A config of git, as one has it for large repositories
    git(repository, "config", "status.showUntrackedFiles", "no")
    changed = provenance.code_state(repository)
    assert changed["dirty"] is True and changed["tree_hash"] != clean["tree_hash"]


def test_the_diff_applies_whatever_git_is_configured_to_print(repository, tmp_path_factory):
    (repository / "src" / "a.py").write_text("second\n \n")
    (repository / "src" / "new one.py").write_text("x = 1\n")
    (repository / "logbook" / "new.md").write_text("a page\n")
    for setting in (("diff.noprefix", "true"), ("color.ui", "always"), ("diff.external", "false")):
        git(repository, "config", *setting)
    other = tmp_path_factory.mktemp("other")
    git(repository, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    (other / "code.diff").write_text(provenance.code_diff(repository))
    git(other / "tree", "apply", str(other / "code.diff"))
    assert (other / "tree/src/a.py").read_text() == "second\n \n"
    assert (other / "tree/src/new one.py").read_text() == "x = 1\n" and not (
        other / "tree/logbook/new.md"
    ).exists()
    for i in range(5):
        (repository / "src" / f"large{i}.py").write_text("line\n" * 20_000)
    diff = provenance.code_diff(repository)
    assert (
        "+line" in diff
        and diff.endswith("… cut here\n")
        and len(diff) == provenance.DIFF_LIMIT + 12
    )


def test_a_diff_keeps_bytes_and_line_ends(repository, tmp_path_factory):
    content = b"# caf\xe9\r\nsecond\r\n"
    (repository / "src" / "a.py").write_bytes(content)
    other = tmp_path_factory.mktemp("other")
    git(repository, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    diff = provenance.code_diff(repository)
    (other / "code.diff").write_bytes(diff.encode(errors="surrogateescape"))
    git(other / "tree", "apply", str(other / "code.diff"))
    assert (other / "tree/src/a.py").read_bytes() == content


def test_a_changed_binary_leaves_a_patch_that_applies(repository, tmp_path_factory):
    (repository / "src" / "icon.png").write_bytes(b"\0one")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "icon")
    other = tmp_path_factory.mktemp("other")
    git(repository, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    (repository / "src" / "icon.png").write_bytes(b"\0two")
    (repository / "src" / "new.png").write_bytes(b"\0new")
    (repository / "configs" / "a.yaml").chmod(0o755)
    (repository / "requirements.txt").write_text("second\n")
    diff = provenance.code_diff(repository)
    assert "Binary files a/src/icon.png and b/src/icon.png differ" in diff
    (other / "code.diff").write_text(diff)
    git(other / "tree", "apply", str(other / "code.diff"))
    assert (other / "tree/requirements.txt").read_text() == "second\n"
    assert os.access(other / "tree/configs/a.yaml", os.X_OK)
    assert not (other / "tree/src/new.png").exists()


CODE = """\
cls_token = self.cls_token.expand(len(x), -1, -1)
def forward(self, tokens: Tensor) -> Tensor:
    return tokens[:, 0] if self.pool == "token" else tokens.mean(1)
"""


def test_redaction_leaves_a_patch_of_code_that_applies(repository, tmp_path_factory):
    (repository / "src/a.py").write_text(CODE)
    git(repository, "commit", "-qam", "a transformer")
    other = tmp_path_factory.mktemp("other")
    git(repository, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    secrets = 'api_key = "abc-def"\ntoken: str = f\'hunter2\'\nos.environ["HF_TOKEN"] = "hunter2"\n'
    (repository / "src/a.py").write_text(CODE + secrets + "tokens = self.embed(x)\n")
    (repository / "configs/a.yaml").write_text("first\nsecret_key: hunter2\n")
    diff = redact_diff(provenance.code_diff(repository))
    (other / "code.diff").write_text(diff)
    git(other / "tree", "apply", str(other / "code.diff"))
    text = (other / "tree/src/a.py").read_text()
    assert text.startswith(CODE) and text.endswith("tokens = self.embed(x)\n")
    assert diff.count(REDACTED) == 4 and "hunter2" not in diff and "abc-def" not in diff


def test_an_unknown_commit_has_a_reason(repository, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    assert "not a git repository" in provenance.code_state(empty)["commit_unknown"]
    (empty / "COMMIT").write_text("ab" * 20 + "\n")  # an image without git
    assert (
        provenance.code_state(empty)["commit"] == "ab" * 20
        and provenance.code_state(empty)["dirty"] is None
    )
    (empty / "COMMIT").write_text("ab" * 20 + "-dirty\n")
    state = provenance.code_state(empty)
    assert (state["commit"], state["dirty"]) == ("ab" * 20, True)
    (empty / "COMMIT").write_text("\n")
    state = provenance.code_state(empty)
    assert state["commit"] is None and "without COMMIT" in state["commit_unknown"]
    os.chown(repository, 12345, 12345) if os.geteuid() == 0 else pytest.skip(
        "only root can give a folder away"
    )
    reason = provenance.code_state(repository)["commit_unknown"]
    assert "dubious ownership" in reason and reason.endswith(
        f"git config --global --add safe.directory {repository}"
    )
    monkeypatch.setenv("PATH", str(empty))
    assert provenance.code_state(repository)["commit_unknown"] == "git is not installed"
    (empty / "git").write_text("#!/bin/sh\nread forever </dev/zero\n")
    (empty / "git").chmod(0o755)
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 0.1)
    assert provenance.code_state(repository)["commit_unknown"] == "git took longer than 0.1 s"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
     ("0::/", {}, 8),
     ("0::/", {"cpu.max": "50000 100000"}, 1),
     ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
     ("1:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8)],
)  # fmt: skip
def test_cores_follow_the_quota_of_every_group_above(groups, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in {"cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_cores(tmp_path / "cgroup", tmp_path) == cores


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [("0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "max"}, 4096),
     ("0::/", {}, 10_000),
     ("0::/", {"memory.max": "8192"}, 8192),
     ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "2048"}, 2048),
     ("1:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 10_000)],
)  # fmt: skip
def test_memory_follows_the_limit_of_every_group_above(groups, files, memory, tmp_path):
    for name, text in {"cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_memory(10_000, tmp_path / "cgroup", tmp_path) == memory


def test_gpus_and_interfaces_are_found_without_a_driver():
    chosen = {"0,3": 2, "": 0, "-1": 0, "NoDevFiles": 0, "GPU-1f, 2,-1,3": 2}
    assert {word: count_visible_gpus({"CUDA_VISIBLE_DEVICES": word}) for word in chosen} == chosen
    assert (
        network_interface("127.0.0.1") == "lo" and network_interface("no.such.host.invalid") is None
    )


# No secret reaches a page, and what is none stays readable.

SECRET = "4hunter2-Geheim"
LEAKS = [
    (f"s3.secret_key={SECRET} trainer.devices=2", "trainer.devices=2"),
    (f"python src/train.py --password {SECRET} seed=1", "seed=1"),
    (f"AWS_SECRET_ACCESS_KEY={SECRET} python src/train.py", "python src/train.py"),
    (f'+    api_key: "{SECRET} with blanks"  # end', "# end"),
    (f"could not open https://me:{SECRET}@host/path/file", "host/path/file"),
    (
        f"GET https://b.s3.amazonaws.com/k.ckpt?X-Amz-Credential=A&X-Amz-Signature={SECRET} failed",
        "failed",
    ),
    (f"Authorization: Bearer {SECRET} end", "end"),
    (f"redis://{SECRET}@cache:6379/0", "cache:6379/0"),
    (f"db_password='{SECRET}, x' next=1", "next=1"),
]
FORMS = [
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "sk-proj-abcdefghijklmnopqrstuv",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
]
HARMLESS = [
    "python src/train.py experiment=vit_ddp trainer.devices=2 data.global_batch_size=256",
    "3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
    "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c",
    "s3://models/vit/2026-11-20_20-15-00_aa11bb/best-step00001925.ckpt",
    '{"max_tokens": 512, "tokens": 1.5}; tokens=1,024 (tokens=7)',
    "model.num_tokens=196 model.class_token=true s3.secret_key=null",
    "https://github.com/owner/name/pull/12?diff=split",
    "logs/train/runs/2026-11-20_20-15-00_aa11bb/checkpoints/best.ckpt",
    "timm/vit_base_patch32_224.augreg_in21k_ft_in1k",
    "/home/Jane/Datasets/ILSVRC2012TrainImages",
]


def test_named_secrets_go_and_the_rest_stays():
    for text, kept in LEAKS:
        cleaned = redact_text(text)
        assert SECRET not in cleaned and REDACTED in cleaned and kept in cleaned
    for text in ("a-" * 100_000, "a://" * 50_000, "secret" * 30_000, "?" * 200_000):
        assert redact_text(text) == text, (
            "long texts are linear: quadratic behaviour would take minutes"
        )


@pytest.mark.parametrize(
    "name", ["password", "pwd", "authorization", "account_key", "access_key_id", "hf-tokens"]
)
def test_a_name_decides_on_pages_and_in_options_alike(name):
    with pytest.raises(UserError, match=f"callbacks.x.{name} holds a secret") as raised:
        refuse_secrets({"callbacks": {"x": {name: SECRET}}})
    assert SECRET not in str(raised.value) and SECRET not in redact_text(f"{name}={SECRET}")
    assert redact({"a": [{name: SECRET, "num_tokens": 196}]}) == {
        "a": [{name: REDACTED, "num_tokens": 196}]
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_known_form_goes_and_is_no_option(form):
    assert redact_text(f"before {form} after") == f"before {REDACTED} after"
    for value in (form, f"key is {form}", {"a": [form]}):
        with pytest.raises(UserError, match="holds a token or key"):
            refuse_secrets({"tags": value})


def test_what_is_harmless_stays_and_is_taken():
    assert redact([*HARMLESS, None, 40]) == [*HARMLESS, None, 40]
    refuse_secrets(
        {
            "tags": HARMLESS,
            "model": {"num_tokens": 196, "class_token": True},
            "s3": {"sse_kms_key_id": "k"},
        }
    )
    refuse_secrets({"s3": {"secret_key": None, "token": "", "password": "null"}})


@pytest.mark.parametrize(("driver", "count"), [(True, 2), (False, 0)])
def test_gpus_are_counted_by_the_driver_without_nvml(driver, count, monkeypatch):
    class Cuda:
        def cuInit(self, flags):
            return 0

        def cuDeviceGetCount(self, found):
            found._obj.value = 2
            return 0

    def load(name):
        if not driver:
            raise OSError(f"{name}: no such file")
        return Cuda()

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr("ctypes.CDLL", load)
    assert count_visible_gpus({}) == count

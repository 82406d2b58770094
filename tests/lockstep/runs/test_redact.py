"""No secret reaches a page, and what is none stays readable."""

import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.redact import REDACTED, redact, redact_text, refuse_secrets

SECRET = "hunter2-Geheim"
LEAKS = [
    (f"s3.secret_key={SECRET} trainer.devices=2", "trainer.devices=2"),
    (f"python src/train.py --password {SECRET} seed=1", "seed=1"),
    (f"AWS_SECRET_ACCESS_KEY={SECRET} python src/train.py", "python src/train.py"),
    (f'+    api_key: "{SECRET} with blanks"  # end', "# end"),
    (f"could not open https://me:{SECRET}@host/path/file", "host/path/file"),
    (f"GET https://b.s3.amazonaws.com/k.ckpt?X-Amz-Credential=A&X-Amz-Signature={SECRET} failed", "failed"),
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
        assert redact_text(text) == text, "long texts are linear: quadratic behaviour would take minutes"


@pytest.mark.parametrize("name", ["password", "pwd", "authorization", "account_key", "access_key_id", "hf-tokens"])
def test_a_name_decides_on_pages_and_in_options_alike(name):
    with pytest.raises(UserError, match=f"callbacks.x.{name} holds a secret") as raised:
        refuse_secrets({"callbacks": {"x": {name: SECRET}}})
    assert SECRET not in str(raised.value) and SECRET not in redact_text(f"{name}={SECRET}")
    assert redact({"a": [{name: SECRET, "num_tokens": 196}]}) == {"a": [{name: REDACTED, "num_tokens": 196}]}


@pytest.mark.parametrize("form", FORMS)
def test_a_known_form_goes_and_is_no_option(form):
    assert redact_text(f"before {form} after") == f"before {REDACTED} after"
    for value in (form, f"key is {form}", {"a": [form]}):
        with pytest.raises(UserError, match="holds a token or key"):
            refuse_secrets({"tags": value})


def test_what_is_harmless_stays_and_is_taken():
    assert redact([*HARMLESS, None, 40]) == [*HARMLESS, None, 40]
    refuse_secrets({"tags": HARMLESS, "model": {"num_tokens": 196, "class_token": True}, "s3": {"sse_kms_key_id": "k"}})
    refuse_secrets({"s3": {"secret_key": None, "token": "", "password": "null"}})

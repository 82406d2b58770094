"""Files and names from strangers: no code of theirs runs, nothing is written where it should not be, and the sentence
names what is wrong. The canary is a file that each attack would make."""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt

from data.cifar10 import ARCHIVE, FOLDER, TRAIN_FILES, CIFAR10DataModule
from data.mnist import read_idx
from example_runs import example_config, write_run
from lockstep.callbacks.checkpoint_io import read_checkpoint, write_checkpoint
from lockstep.data.array_pickle import load_arrays
from lockstep.data.framing import Framing
from lockstep.pages.build import keep_run
from lockstep.runs.errors import UserError
from lockstep.storage.checkpoint_files import Sidecar, complete, measure, sidecar_path, write_sidecar
from lockstep.training.inference import load_finished
from runs import run_door

SMALL = ["data=synthetic", "data.num_images=200", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer=cpu", "trainer.max_epochs=1"]  # fmt: skip


class Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch '{self.canary}'",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    done = run_door("train", *SMALL, "run_id=good", logs=tmp_path_factory.mktemp("trained"))
    assert done.code == 0, done.output
    return done


@pytest.fixture
def canary(tmp_path):
    """Outside of what a door may write to; must not exist when the test ends."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "canary"
    yield path
    assert not path.exists(), "the attack ran"
    assert list(path.parent.iterdir()) == [], "something was written outside"


def good(trained):
    path, _ = next(complete(trained.folder.checkpoints, "best"))
    return read_checkpoint(path)


# What each attack writes as a checkpoint, and a word of the sentence that refuses it; None: it is read, harmlessly.


def raw_pickle(content, path, canary):
    path.write_bytes(pickle.dumps({**content, "x": Payload(canary)}, 2))


def torch_zip(content, path, canary):
    torch.save({**content, "x": Payload(canary)}, path)


def torch_before_zip(content, path, canary):
    torch.save({**content, "x": Payload(canary)}, path, _use_new_zipfile_serialization=False)


def optimizer_state(content, path, canary):
    torch.save({**content, "optimizer_states": [{"state": {0: Payload(canary)}}]}, path)


def torchscript(content, path, canary):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/extra.pkl", pickle.dumps(Payload(canary)))


def climbing_zip(content, path, canary):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"../../../outside/{canary.name}", "x")
        archive.writestr(str(canary), "x")


def lightning_instantiator(content, path, canary):
    command = {"command": f"touch '{canary}'"}
    torch.save(
        {**content, "hyper_parameters": {"_instantiator": "os.system", "_class_path": "os.system", **command},
         "datamodule_hyper_parameters": {"_instantiator": "posix.system", **command},
         "hparams_name": "kwargs", "hparams_type": "os.system", "callbacks": {"os.system": command}}, path,
    )  # fmt: skip


def with_config(content, path, change):
    """The checkpoint with another config, as its file says it."""
    content = {**content, "lockstep": json.loads(json.dumps({k: content["lockstep"][k] for k in ("config", "data")}))}
    change(content["lockstep"]["config"])
    torch.save(content, path)


def target_by_alias(content, path, canary):
    target = {"_target_": "models.timm.warnings.sys.modules"}
    with_config(content, path, lambda config: config["model"].update(target))


def target_of_the_loss(content, path, canary):
    target = {"_target_": "torch.nn.modules.module.functools.partial", "command": f"touch '{canary}'"}
    with_config(content, path, lambda config: config["classifier"].update(target))


def target_of_the_optimizer(content, path, canary):
    """Nothing of it is read where nothing is trained."""
    target = {"_target_": "logging.os.system", "command": f"touch '{canary}'"}
    with_config(content, path, lambda config: config.update(optimizer=target, trainer={"strategy": target}))


def chain_of_allowed_names(content, path, canary):
    """Each class and function is torch's own; together they were os.system."""
    nn, deprecation = "torch.nn.utils", "torch.nn.utils._deprecation_utils.lazy_deprecated_import"
    getter = {"_target_": deprecation, "all": ["system"], "old_module": "x", "new_module": "os"}

    def called(module, *arguments):
        wrapped = {"_target_": "torch.optim.swa_utils.AveragedModel",
                   "model": {"_target_": "torch.nn.DataParallel", "module": module}}  # fmt: skip
        return {"_target_": f"{nn}.stateless.functional_call", "module": wrapped,
                "parameter_and_buffer_dicts": {}, "args": list(arguments)}  # fmt: skip

    chain = called(called(getter, "system"), f"touch '{canary}'")
    with_config(content, path, lambda config: config["model"].update(extra=chain))


def any_module_of_torch(content, path, canary):
    target = {"_target_": "torch.nn.attention._fa3._fa3_import_module", "module_name": "antigravity"}
    with_config(content, path, lambda config: config["data"].update(mean=target))


def a_writer_that_deletes(content, path, canary):
    target = {"_target_": "lightning.pytorch.loggers.csv_logs.ExperimentWriter", "log_dir": str(canary.parent)}
    with_config(content, path, lambda config: config.update(logger={"csv": target}, callbacks={"x": target}))


def an_address_to_fetch(content, path, canary):
    overlay = {"url": "http://127.0.0.1:9/weights.pth"}
    with_config(content, path, lambda config: config["model"].update(pretrained=True, pretrained_cfg_overlay=overlay))


def a_model_of_the_hub(content, path, canary):
    node = {"_target_": "models.timm.TimmModel", "name": "hf-hub:user/model", "pretrained": True}
    with_config(content, path, lambda config: config.update(model=node, choices={**config["choices"], "model": "timm"}))


def an_interpolation(content, path, canary):
    with_config(content, path, lambda config: config["data"].update(name="${oc.env:HOME}", resize="${oc.env:HOME}"))


def an_option_that_climbs(content, path, canary):
    with_config(content, path, lambda config: config["choices"].update(model="../../outside/evil"))


def a_net_that_fills_the_memory(content, path, canary):
    """Small numbers in a small file; what they build has far more weights than the file."""
    node = {"_target_": "models.timm.vit_tiny_32", "depth": 100_000, "embed_dim": 30_000, "num_heads": 3}
    choice = {"model": "vit_tiny_32"}
    with_config(content, path, lambda config: config.update(model=node, choices={**config["choices"], **choice}))


CHECKPOINTS = {
    raw_pickle: "no checkpoint that can be loaded safely",
    torch_zip: "no checkpoint that can be loaded safely",
    torch_before_zip: "no checkpoint that can be loaded safely",
    optimizer_state: "no checkpoint that can be loaded safely",
    torchscript: "no checkpoint that can be loaded safely",
    climbing_zip: "no checkpoint that can be loaded safely",
    lightning_instantiator: None,
    target_by_alias: "model._target_='models.timm.warnings.sys.modules'",
    target_of_the_loss: "classifier._target_='torch.nn.modules.module.functools.partial'",
    target_of_the_optimizer: None,
    chain_of_allowed_names: "model.extra=",
    any_module_of_torch: None,
    a_writer_that_deletes: None,
    an_address_to_fetch: None,
    a_model_of_the_hub: "model.name='hf-hub:user/model'",
    an_interpolation: None,
    an_option_that_climbs: "model='../../outside/evil', which this clone does not have",
    a_net_that_fills_the_memory: "a net that is far larger than its weights",
}


@pytest.mark.parametrize("attack", CHECKPOINTS, ids=lambda attack: attack.__name__)
def test_a_hostile_checkpoint_runs_nothing(attack, trained, canary, tmp_path):
    """Nor where it lies among this machine's runs."""
    logs = tmp_path / "logs"
    path, wanted = put(attack, trained, canary, logs), CHECKPOINTS[attack]
    if wanted:
        with pytest.raises(UserError) as raised:
            load_finished(str(path), logs)
        assert wanted in str(raised.value)
    else:
        load_finished(str(path), logs)


OFTEN = (raw_pickle, chain_of_allowed_names, any_module_of_torch)


@pytest.mark.parametrize(
    "attack",
    [attack if attack in OFTEN else pytest.param(attack, marks=pytest.mark.slow) for attack in CHECKPOINTS],
    ids=lambda attack: attack.__name__,
)
def test_eval_of_a_hostile_checkpoint_runs_nothing(attack, trained, canary, tmp_path):
    path, wanted = put(attack, trained, canary, tmp_path), CHECKPOINTS[attack]
    done = run_door("eval", f"ckpt_path={path}", logs=tmp_path)
    assert "Traceback" not in done.output
    assert done.code == (2 if wanted else 0), done.output
    assert (wanted or "test/acc") in done.output.strip().splitlines()[-1]


def put(attack, trained, canary, logs):
    """The attack's checkpoint among this machine's runs."""
    path = logs / "train" / "runs" / "theirs" / "checkpoints" / "best-step00000001.ckpt"
    path.parent.mkdir(parents=True)
    attack(good(trained), path, canary)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("attack", [raw_pickle, optimizer_state, lightning_instantiator], ids=lambda a: a.__name__)
def test_going_on_from_a_hostile_checkpoint_runs_nothing(attack, trained, canary, tmp_path):
    """As ckpt_path of a new run, and put over the last one of a run that is resumed, with the right hash beside it."""
    logs, wanted = tmp_path / "logs", CHECKPOINTS[attack]
    first = run_door("train", *SMALL, "run_id=r", logs=logs)
    last, sidecar = next(complete(first.folder.checkpoints, "last"))
    attack(good(trained), last, canary)
    write_sidecar(last, Sidecar.of(measure(last), step=sidecar.step))
    for word in (f"ckpt_path={last}", "resume=r"):
        done = run_door("train", *SMALL, word, "trainer.max_epochs=2", logs=logs)
        assert done.code == (2 if wanted else 0), done.output
        assert "Traceback" not in done.output and (wanted or "finished") in done.output.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_config_that_was_put_into_a_run_folder_names_no_code(trained, canary, tmp_path):
    """What this machine's user typed is signed; a config.yaml without that is data."""
    import yaml

    logs = tmp_path / "logs"
    folder = run_door("train", *SMALL, "run_id=r", logs=logs).folder
    config = yaml.safe_load(folder.config.read_text())
    config["callbacks"]["extra"] = {"_target_": "os.system", "command": f"touch '{canary}'"}
    config["overrides"].append(f"+callbacks.x={{_target_: os.system, command: touch {canary}}}")
    config["data"]["cache_dir"] = config["paths"]["logbook_dir"] = str(canary.parent)
    folder.config.write_text(yaml.safe_dump(config))
    assert run_door("eval", "ckpt_path=r", logs=logs).code == 0
    done = run_door("train", "resume=r", "trainer.max_epochs=2", logs=logs)
    assert done.code == 0 and "finished" in done.output, done.output
    folder.config.write_text(f"a: !!python/object/apply:os.system [\"touch '{canary}'\"]\n")
    done = run_door("train", *SMALL, "resume=r", "trainer.max_epochs=3", logs=logs)
    assert done.code == 2 and "config.yaml" in done.output and "Traceback" not in done.output, done.output


@pytest.mark.slow
def test_anothers_checkpoint_does_not_choose_where_anything_is_written_or_sent(trained, canary, tmp_path):
    content = good(trained)
    config = content["lockstep"]["config"]
    config["data"].update(cache_dir=str(canary.parent / "cache"))
    config["paths"] = dict.fromkeys(config["paths"], str(canary.parent))
    config["s3"] = {"uri": "s3://anothers/bucket", "endpoint_url": "http://127.0.0.1:9", "required": True}
    path = tmp_path / "anothers.ckpt"
    write_checkpoint(content, path)
    done = run_door("eval", f"ckpt_path={path}", logs=tmp_path / "logs")
    assert done.code == 0 and "s3" not in done.output and "127.0.0.1:9" not in done.output, done.output
    config["data"]["name"] = "../../outside/x"
    write_checkpoint(content, path)
    assert run_door("eval", f"ckpt_path={path}", logs=tmp_path / "logs").code == 0


@pytest.mark.slow
def test_a_record_beside_a_checkpoint_does_not_say_where_export_writes(trained, canary, tmp_path, monkeypatch):
    import export

    folder = tmp_path / "theirs"
    shutil.copytree(trained.folder.path, folder)
    checkpoint, _ = next(complete(folder / "checkpoints", "best"))
    record = json.loads((folder / "run.json").read_text())
    monkeypatch.chdir(tmp_path)
    for run_id in ("..", "../outside", str(canary.parent), "a/b"):
        (folder / "run.json").write_text(json.dumps({**record, "run_id": run_id}))
        assert export.main([f"ckpt_path={checkpoint}", "formats=safetensors"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "outside", "exports"}
    assert [path.name for path in (tmp_path / "exports").iterdir()] == [checkpoint.stem]


@pytest.mark.parametrize(
    "damage",
    ["config", *(pytest.param(key, marks=pytest.mark.slow) for key in ("lockstep", "model", "trainer", "data"))],
)
def test_a_checkpoint_with_nonsense_where_its_config_was(damage, trained, tmp_path):
    content = good(trained)
    own = content["lockstep"]
    {"lockstep": content, "config": own}.get(damage, own["config"])[damage] = ["nonsense"]
    write_checkpoint(content, tmp_path / "x.ckpt")
    done = run_door("eval", f"ckpt_path={tmp_path / 'x.ckpt'}", logs=tmp_path / "logs")
    said = {"lockstep": "no", "config": "carries no config", "model": "says model=",
            "data": "of another model", "trainer": "test/acc"}  # fmt: skip
    assert done.code == (0 if damage == "trainer" else 2), done.output
    assert said[damage] in done.output and "Traceback" not in done.output, done.output


# Data files


def test_a_pickled_array_file_is_not_unpickled(canary, tmp_path):
    """A cache folder holds labels.npy; one that somebody put there with objects in it is refused by NumPy."""
    from data.synthetic import SyntheticDataModule

    def module():
        return SyntheticDataModule(num_images=100, image_size=8, global_batch_size=10, cache_dir=tmp_path / "cache")

    module().prepare()
    [labels] = (tmp_path / "cache").glob("*/labels.npy")
    np.save(labels, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    meta = json.loads((labels.parent / "meta.json").read_text())
    meta["files"]["labels.npy"] = labels.stat().st_size
    (labels.parent / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        module().prepare()


@pytest.mark.parametrize("protocol", range(6))
def test_a_batch_file_with_code(protocol, canary):
    data = pickle.dumps({b"data": Payload(canary)}, protocol)
    with pytest.raises(UserError, match="data_batch_1 .*asks for posix.system"):
        load_arrays(io.BytesIO(data), "data_batch_1")


GADGETS = {
    "an attribute of an allowed name": b"cnumpy\nndarray.__init__.__globals__\n.",
    "a name with a dot": b"\x80\x04\x8c\x05numpy\x8c\x10core.multiarray.\x93.",
    "builtins": b"c__builtin__\neval\n(S'1'\ntR.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pid\n.",
    "NumPy's own loader": b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
    "a huge array": b"cnumpy\nndarray\n((I99999999999\nI99999999999\nttR.",
    "a million objects": b"cnumpy\nndarray\n((I1000000\ntS'O'\ntR.",
    "a huge empty array": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I1000000\ntS'b'\ntR.",
    "a place far out in the table of objects": b"\x80\x02Nr\xff\xff\xff\x00.",
    "an encoding that doubles": b"c_codecs\nencode\n(S'abc'\nS'hex_codec'\ntR.",
}


@pytest.mark.parametrize("name", GADGETS)
def test_a_batch_file_with_a_gadget(name):
    with pytest.raises(UserError, match="data_batch_1 is truncated or not one of the official files"):
        load_arrays(io.BytesIO(GADGETS[name]), "data_batch_1")


def archive_with(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data, kind in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, "/etc/passwd", len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(data) if kind == tarfile.REGTYPE else None)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_an_archive_that_climbs_or_links_or_is_a_device(kind, canary, tmp_path):
    """Members are read by their last name and never written; what is no plain file is not read."""
    path = tmp_path / ARCHIVE
    members = [(f"../../outside/{canary.name}", b"x", kind), (str(canary), b"x", kind)]
    members += [(f"{FOLDER}/{name}", pickle.dumps({}), kind) for name in (*TRAIN_FILES, "test_batch")]
    archive_with(path, members)
    with pytest.raises(UserError, match="is not a CIFAR-10 file|lacks data_batch_1"):
        CIFAR10DataModule(root=path, cache_dir=tmp_path / "cache", global_batch_size=10).prepare()


def test_an_archive_that_unpacks_to_more_than_the_memory(tmp_path, monkeypatch):
    import data.cifar10 as module

    monkeypatch.setattr(module, "MAX_BYTES", 10**6)
    path = tmp_path / ARCHIVE
    archive_with(path, [(f"{FOLDER}/data_batch_1", bytes(10**6 + 1), tarfile.REGTYPE)])
    with pytest.raises(UserError, match="data_batch_1 has 1000001 bytes"):
        CIFAR10DataModule(root=path, cache_dir=tmp_path / "cache", global_batch_size=10).prepare()


def test_a_gzip_bomb(tmp_path, monkeypatch):
    import data.mnist as module

    monkeypatch.setattr(module, "MAX_BYTES", 10**6)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x01" + struct.pack(">I", 5 * 10**6) + bytes(5 * 10**6)))
    with pytest.raises(UserError, match="holds more than 1000000 bytes"):
        read_idx(path)


def test_dimensions_whose_product_overflows(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(b"\x00\x00\x08\x03" + struct.pack(">III", 2**31, 2**31, 4))  # 2**64, which 64 bits take for 0
    with pytest.raises(UserError, match="instead of"):
        read_idx(path)


# Names


@pytest.mark.parametrize(
    "word",
    [
        *("run_id=../x", "resume=../../x", "data.name=../../outside/x", "s3.uri=s3://bucket/../../x"),
        *(pytest.param(word, marks=pytest.mark.slow) for word in ("run_id=/tmp/x", "run_id=..", "run_id=a/b")),
    ],
)
def test_a_name_that_climbs_is_refused_by_its_key(word, canary, tmp_path):
    done = run_door("train", *SMALL, word, logs=tmp_path / "logs")
    assert done.code == 2 and "Traceback" not in done.output, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and word.partition("=")[2].removeprefix("s3://bucket/") in last
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "outside"}


HOSTILE = [
    "../../../outside/x", "</details><script>alert(1)</script>", "![x](javascript:alert(1))", "<img src=x onerror=a()>",
    "| --- |\n# heading", "`code` $\\href{javascript:a()}{x}$", "[x]: http://evil", "@everyone", "\u202egnp.exe",
    "'\"; rm -rf /", "{{7*7}}", "%2e%2e%2f", "\x1b[31mred", "x" * 5000,
]  # fmt: skip


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.found += [(tag, f"{name}={value}") for name, value in attrs if name.startswith("on")]
        self.found += [(tag, str(value)) for name, value in attrs if "javascript:" in str(value)]
        if tag in ("script", "iframe", "object", "form"):
            self.found.append((tag, ""))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_with_markup_leaves_the_page_whole(text, canary, tmp_path):
    folder = write_run(
        tmp_path / "runs", "run-1", status="failed", config=example_config(name=text), tags=[text, f"b{text}"],
        experiment=text,
        model=text, data=text, trainer=text, hosts=[{"host": text}], command=text,
        error={"message": text, "host": text, "phase": text, "rank": 0},
    )  # fmt: skip
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "run_id": text}))
    keep_run(folder, tmp_path / "logbook")
    pages = sorted((tmp_path / "logbook").rglob("*.md"))
    assert len(pages) >= 2
    for page in pages:
        tags = Tags()
        tags.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(page.read_text()))
        assert tags.found == [], page
    names = {str(path.relative_to(tmp_path)).split("/")[0] for path in tmp_path.rglob("*")}
    assert names == {"runs", "logbook", "outside"}


@pytest.mark.slow
def test_a_sidecar_of_another_file_names_nothing_outside(trained, canary, tmp_path):
    """The small file beside a checkpoint only says bytes and hash; where it is wrong the checkpoint is passed over."""
    logs = tmp_path / "logs"
    first = run_door("train", *SMALL, "run_id=r", logs=logs)
    last, sidecar = next(complete(first.folder.checkpoints, "last"))
    sidecar_path(last).write_text(
        json.dumps({**sidecar.as_json(), "file": str(canary), "path": str(canary), "sha256": "../x"})
    )
    done = run_door("train", *SMALL, "resume=r", "trainer.max_epochs=2", logs=logs)
    assert done.code == 0 and f"Passed over {last.name}" in done.output, done.output


# Images


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def fake_ghostscript(canary, tmp_path, monkeypatch):
    """A `gs` on the PATH that makes the canary: what Pillow starts for an EPS file, whatever the file is called."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{canary}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return program


def test_an_eps_file_with_another_name_starts_no_program(fake_ghostscript, canary, tmp_path):
    from lockstep.data.image_tree import CorruptImage, common_size, decode

    path = tmp_path / "x.png"
    path.write_bytes(EPS)
    with pytest.raises(CorruptImage, match="x.png cannot be decoded"):
        decode(path, Framing(8, 8))
    assert common_size([lambda: path.open("rb")]) is None


def test_predict_starts_no_program_for_an_image(trained, fake_ghostscript, canary, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.png").write_bytes(EPS)
    path, _ = next(complete(trained.folder.checkpoints, "best"))
    from predict import main

    assert main([f"ckpt_path={path}", f"images={tmp_path / 'images'}", f"out={tmp_path / 'p.csv'}"]) == 2


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_the_formats_that_are_listed_are_read(kind, tmp_path):
    from PIL import Image

    from lockstep.data.image_tree import decode

    Image.new("RGB", (8, 8), (200, 100, 50)).save(tmp_path / "x.img", kind)
    pixels = decode(tmp_path / "x.img", Framing(8, 8))
    assert pixels.shape == (8, 8, 3) and np.abs(pixels[4, 4].astype(int) - (200, 100, 50)).max() < 8


# Addresses


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "FILE:/etc/passwd", "/etc/passwd", "data:,x"])
def test_only_addresses_of_the_web_are_fetched(url, canary, tmp_path):
    """What urllib opens beside http is this machine's own; its digest stood in the error."""
    from lockstep.data.download import download

    with pytest.raises(UserError, match="only http and https addresses are fetched") as raised:
        download(["http://127.0.0.1:9/x", url], tmp_path / "x", md5="0" * 32)
    assert "MD5" not in str(raised.value)


# Files and names that Python cannot write everywhere


@pytest.mark.slow
def test_file_names_that_are_no_utf8(trained, tmp_path):
    """Classes and images as a disk of another system names them: trained on, predicted, written, shown."""
    from PIL import Image

    root = tmp_path / "images"
    chance = np.random.default_rng(0)
    for label in (b"caf\xe9", b"=1+1", b"\x1b[31mred"):
        folder = os.path.join(os.fsencode(root), label)
        os.makedirs(folder)
        for i in range(8):
            pixels = chance.integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(os.path.join(folder, b"\xff%d.png" % i), "PNG")
    words = ["data=image_folder", f"data.root={root}", "data.image_size=8", "data.global_batch_size=8",
             "data.test_fraction=0.25", "model=small_cnn", "trainer=cpu", "trainer.max_epochs=1",
             "run_id=r"]  # fmt: skip
    done = run_door("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert "\x1b[31mred" not in done.output
    table = done.folder.confusion_matrix.read_text(encoding="utf-8").splitlines()
    assert table[0] == "true \\ predicted,\x1b[31mred,'=1+1,caf\\udce9"
    picture = done.folder.confusion_image.read_text(encoding="utf-8")
    assert "=1+1" in picture and "'=1+1" not in picture and "\x1b" not in picture
    out = tmp_path / "p.csv"
    from predict import main

    best, _ = next(complete(done.folder.checkpoints, "best"))
    assert main([f"ckpt_path={best}", f"images={root}", f"out={out}"]) == 0
    rows = out.read_text(encoding="utf-8").splitlines()
    assert len(rows) == 25 and any(row.startswith("caf\\udce9/\\udcff0.png,") for row in rows)
    assert any(row.startswith("'=1+1/") for row in rows)


# A run that goes on from a damaged folder

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("run.json", lambda text: text.replace('"steps": ', '"steps": "abc", "was": '), "steps is 'abc'"),
        ("run.json", lambda text: text[: len(text) // 2], "is not a run record"),
        pytest.param("run.json", lambda text: "[" * 10_000, "is not a run record", marks=SLOW),
        pytest.param("config.yaml", lambda text: f"{text}\ntrainer: []\n", "its trainer is a list", marks=SLOW),
        pytest.param("config.yaml", lambda text: f"{text}\n1: x\n", "was started with another 1", marks=SLOW),
        ("config.yaml", lambda text: "x0: &x0 [x, x]\n" + "".join(
            f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 9)), "more than 100000 values"),
        ("metrics.csv", lambda text: f"{text}1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\udcff", None),
    ],
)  # fmt: skip
def test_going_on_in_a_damaged_folder(name, change, says, trained, tmp_path):
    """One sentence where the file decides, and on with the run where it does not; the pages are written either way."""
    import shutil

    logs = tmp_path / "logs"
    shutil.copytree(trained.logs, logs)
    path = logs / "train" / "runs" / "good" / name
    path.write_text(change(path.read_text()), errors="surrogateescape")
    done = run_door("train", *SMALL, "resume=good", "trainer.max_epochs=2", logs=logs)
    assert "Traceback" not in done.output, done.output
    assert done.code == (2 if says else 0) and (says or "damaged rows are left out") in done.output, done.output
    from logbook import main

    assert main(["--logs", str(logs), "--logbook", str(tmp_path / "logbook"), "build"]) == 0

"""One function refuses checkpoints, in one sentence, whatever is wrong with them."""

import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from lockstep.callbacks.checkpoint_io import read_checkpoint
from lockstep.callbacks.random_states import random_state
from lockstep.runs.errors import UserError
from lockstep.storage.checkpoint_content import check_plain, checked_checkpoint, refused
from lockstep.storage.torch_zip import NotSafe


def whole():
    """A checkpoint as a run writes it, in small."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    facts = {
        "class_names": ["a", "b", "ü"], "num_classes": 3, "image_size": 8, "channels": 1, "mean": [0.5], "std": [0.2],
        "data_hash": "17ca",
    }  # fmt: skip
    return {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.6.6", "state_dict": net.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"Checkpoints": {"best_value": 0.5}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"milestones": Counter([1, 2]), "last": 3}],
        "lockstep": {"config": {"model": {"_target_": "models.x", "widths": [1, 2]}, "seed": None}, "data": facts,
                     "point": {"epoch": 0, "batches_done": 3, "batches_per_epoch": 3, "phase": "validation"},
                     "loader": {"epoch": 1}, "random": [random_state()]},
    }  # fmt: skip


def changed(content, path, value):
    """With another value at `a/b/c`."""
    *places, last = path.split("/")
    node = content
    for place in places:
        node = node[int(place) if isinstance(node, list) else place]
    node[last] = value
    return content


def test_a_real_one_comes_back_as_it_was(tmp_path):
    content = whole()
    torch.save(content, tmp_path / "x.ckpt")
    found = read_checkpoint(tmp_path / "x.ckpt")
    assert found.keys() == content.keys()
    assert all(torch.equal(found["state_dict"][name], value) for name, value in content["state_dict"].items())
    assert found["lockstep"]["data"] == content["lockstep"]["data"]
    assert found["lr_schedulers"] == content["lr_schedulers"]
    assert found["lockstep"]["random"][0]["python"] == content["lockstep"]["random"][0]["python"]
    assert type(found["state_dict"]) is dict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint16, torch.complex64,
                                   torch.float8_e4m3fn, torch.float64])  # fmt: skip
def test_every_type_of_tensor(dtype, tmp_path):
    tensors = {"a": torch.zeros(3, 2, dtype=dtype), "view": torch.zeros(10, dtype=dtype)[2:8:2], "b": torch.zeros(())}
    torch.save(
        {"state_dict": tensors, "kind": dtype, "size": torch.Size([1]), "set": {1}, "c": 1j}, tmp_path / "x.ckpt"
    )
    found = read_checkpoint(tmp_path / "x.ckpt")
    assert found["state_dict"]["view"].shape == (3,) and found["state_dict"]["a"].dtype == dtype
    assert found["kind"] == dtype and found["size"] == (1,) and found["set"] == {1}


@pytest.mark.parametrize(
    "path, value, says",
    [
        ("state_dict", [], "holds no state_dict"),
        ("state_dict", {"a": 1}, "is not tensors by name"),
        ("state_dict", {1: torch.zeros(1)}, "is not tensors by name"),
        ("loops", [1], "its loops is a list"),
        ("global_step", "x", "its global_step is a str"),
        ("pytorch-lightning_version", "x", "its version is 'x'"),
        ("optimizer_states", [{"state": [], "param_groups": []}], "an optimizer's state is none"),
        ("optimizer_states", [{"state": {0: 7}, "param_groups": []}], "an optimizer's state is none"),
        ("optimizer_states", [{"state": {}, "param_groups": [{"lr": 1}]}], "an optimizer's state is none"),
        ("lockstep", ["nonsense"], "carries no config: `lockstep` is a list"),
        ("lockstep/config", "x", "carries no config: `lockstep.config` is a str"),
        ("lockstep/config/model", {"w": torch.zeros(1)}, "holds what no config can"),
        ("lockstep/data", None, "carries no config: `lockstep.data` is a NoneType"),
        ("lockstep/data/class_names", "abc", "its data.class_names is 'abc'"),
        ("lockstep/data/class_names", ["a", 1], "its data.class_names is"),
        ("lockstep/data/class_names", ["x" * 1001], "its data.class_names is"),
        ("lockstep/data/num_classes", 0, "its data.num_classes is 0"),
        ("lockstep/data/num_classes", True, "its data.num_classes is True"),
        ("lockstep/data/image_size", 10**9, "its data.image_size is 1000000000"),
        ("lockstep/data/resize", 10**9, "its data.resize is 1000000000"),
        ("lockstep/data/crop_pct", 0.0, "its data.crop_pct is 0.0"),
        ("lockstep/data/fit", ["crop"], "its data.fit is"),
        ("lockstep/data/interpolation", None, "its data.interpolation is None"),
        ("lockstep/data/class_counts", [1, -1], "its data.class_counts is"),
        ("lockstep/data/channels", "3", "its data.channels is '3'"),
        ("lockstep/data/mean", [math.nan], "its data.mean is"),
        ("lockstep/data/std", [], "its data.std is"),
        ("lockstep/data/data_hash", 7, "its data.data_hash is 7"),
        ("lockstep/point", {"phase": "x"}, "where in training it stands"),
        ("lockstep/point/batches_done", -1, "where in training it stands"),
        ("lockstep/random", [{}], "random states are none"),
        ("lockstep/random/0/torch", torch.zeros(2), "random states are none"),
        ("lockstep/random/0/numpy", ["MT19937", [1], 0, 0, 0.0], "random states are none"),
    ],
)
def test_what_has_another_form_is_named(path, value, says, tmp_path):
    torch.save(changed(whole(), path, value), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=f"x.ckpt is no checkpoint that can be loaded safely: .*{says}"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_random_states_of_today_are_taken():
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(3)
    np.random.standard_normal()
    checked_checkpoint({"state_dict": {}, "lockstep": {"random": [random_state()]}})


def test_stored_sparse_and_meta_tensors_are_refused(tmp_path):
    for tensor in (torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(1).expand(10**9)):
        torch.save({"state_dict": {"a": tensor}}, tmp_path / "x.ckpt")
        with pytest.raises(UserError, match="no checkpoint that can be loaded safely"):
            read_checkpoint(tmp_path / "x.ckpt")
        with pytest.raises(NotSafe, match="not dense|larger than its bytes"):
            check_plain([tensor])


def test_values_that_repeat_each_other_are_counted_as_often():
    """Thirty lists of two that stand for a billion values; whoever walked them would not end."""
    value: list = ["x"]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(NotSafe, match="more than 10000000 values"):
        check_plain(value)
    loop: list = []
    loop.append(loop)
    with pytest.raises(NotSafe, match="deeper than 64"):
        check_plain({"a": loop})


def test_plain_is_plain():
    check_plain(OrderedDict(a=[1, 2.5, None, "x", (True,), {"b": torch.zeros(2)}]))
    for value in (b"x", object(), bytearray(3), np.float64(1.0)):
        with pytest.raises(NotSafe, match=f"holds a {type(value).__name__}"):
            check_plain({"a": [value]})


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), KeyError("x"), IndexError(), TypeError("a\nb"), EOFError()]
)
def test_whatever_is_raised_is_one_sentence(error):
    with pytest.raises(UserError) as raised, refused("x.ckpt"):
        raise error
    assert str(raised.value).startswith(f"x.ckpt is no checkpoint that can be loaded safely: {type(error).__name__}")
    assert "\n" not in str(raised.value)


def test_a_format_of_old_torch_is_refused_in_words(tmp_path):
    torch.save(whole(), tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="it is not in torch's zip format"):
        read_checkpoint(tmp_path / "x.ckpt")

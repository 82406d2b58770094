"""What ranks tell each other without pickles."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from local_ranks import meet, run_ranks
from lockstep.distributed import json_collectives as module
from lockstep.distributed.json_collectives import broadcast_json, gather_json
from lockstep.runs.typed_json import Part

VALUES = [None, "ü" * 1000, {"a": [1, 2.5, True, None]}]


def talk(here):
    meet(here)
    everyone = gather_json(VALUES[here.rank])
    said = [broadcast_json(VALUES[here.rank], src) for src in range(3)]
    return everyone, said


def test_values_of_any_size_arrive_in_rank_order():
    assert run_ranks(talk, 3) == [(VALUES, VALUES)] * 3


def test_alone_the_value_comes_back_as_the_others_would_get_it():
    assert gather_json((1, "a")) == [[1, "a"]] and broadcast_json({"a": (1,)}) == {"a": [1]}


@dataclass(kw_only=True)
class Sample(Part):
    number: int = 0


def stranger(here, data, size):
    """Rank 1 sends these bytes as its part; what rank 0 is told."""
    meet(here)
    if here.rank == 0:
        try:
            return gather_json({"number": 1}, Sample)
        except RuntimeError as error:
            return str(error)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([len(data) if size is None else size]))
    longest = max(int(each) for each in sizes)
    if size is None:
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(2)], own)
    return None


@pytest.mark.parametrize(
    ("data", "size", "said"),
    [
        (b"\x80\x04x.", None, "rank 1 sent no JSON"),
        (b"[" * 100_000, None, "rank 1 sent no JSON"),
        (b'{"number": "1"}', None, "number is '1', not a whole number"),
        (b"[1]", None, "rank 1 sent no JSON"),
        (b"x", 2**62, f"rank 1 sends {2**62} bytes where 1 to"),
        (b"x", -1, "rank 1 sends -1 bytes"),
        (b"x", 0, "rank 1 sends 0 bytes"),
    ],
)
def test_what_another_rank_sends_is_checked_before_it_is_used(data, size, said):
    assert said in run_ranks(stranger, 2, data, size)[0]


def test_what_json_has_no_form_for_is_refused():
    with pytest.raises(TypeError):
        gather_json(object())
    assert module.LARGEST_BYTES >= 2**20


PICKLES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
           "recv_object_list", "loads", "load", "Unpickler"}  # fmt: skip


def test_no_code_of_ours_sends_or_reads_pickles():
    """loads and load count where they are pickle's; two files read others' pickles by unpicklers of their own."""
    for path in Path(lockstep.__path__[0]).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            owner = getattr(getattr(node, "value", None), "id", "")
            pickles = name in PICKLES and (name not in ("loads", "load", "Unpickler") or owner in ("pickle", "cPickle"))
            assert not pickles or path.name in ("array_pickle.py", "torch_zip.py"), f"{path}: {name}"

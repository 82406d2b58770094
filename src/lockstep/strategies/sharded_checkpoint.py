"""A checkpoint as a folder of shards: each rank writes what it holds, and any strategy reads it.

    <name>/shard-0000N-model-….safetensors   tensors with their offsets, by torch.distributed.checkpoint
    <name>/rest.pt                           everything else, as torch.save writes it
    <name>/manifest.json                     every file with its bytes and sha256, written last: complete

Nothing in it is a pickle that runs code: DCP's own format has a pickled .metadata, so its safetensors form is used,
and rest.pt loads with weights_only=True.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from lockstep.runs.errors import UserError
from lockstep.runs.files import checksum_of
from lockstep.runs.foreign_files import read_json
from lockstep.runs.full_disk import full_disk_named
from lockstep.storage.checkpoint_content import checked_checkpoint, load_plain, refused
from lockstep.storage.torch_zip import NotSafe
from lockstep.strategies.sharded_state import State

MANIFEST = "manifest.json"
REST = "rest.pt"
FORMAT = 1
WEIGHTS, OPTIMIZER = "state_dict", "optimizer_states"
Manifest = dict[str, Any]  # the files with their bytes and sha256


def is_shard_folder(path: str | Path) -> bool:
    return (Path(path) / MANIFEST).is_file()


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], State]:
    """The tensors of weights and optimizer states by flat names, and the checkpoint without them.

    `state_dict/<name>`, `optimizer_states/<optimizer>/<parameter's number>/<name>`.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZER)}
    tensors = {f"{WEIGHTS}/{name}": value for name, value in checkpoint.get(WEIGHTS, {}).items()}
    if OPTIMIZER in checkpoint:
        rest[OPTIMIZER] = []
    for index, optimizer in enumerate(checkpoint.get(OPTIMIZER, [])):
        plain: dict[int, State] = {}
        for number, state in optimizer["state"].items():
            plain[number] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIMIZER}/{index}/{number}/{name}"] = value
        rest[OPTIMIZER].append({**optimizer, "state": plain})
    return tensors, rest


def join(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> State:
    """The inverse of `split`."""
    checkpoint = {**rest, WEIGHTS: {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == WEIGHTS:
            checkpoint[WEIGHTS][name] = value
        else:
            index, number, name = name.split("/", 2)
            checkpoint[OPTIMIZER][int(index)]["state"][int(number)][name] = value
    return checkpoint


def write(checkpoint: Mapping[str, Any], folder: Path, first_on_node: bool, group: Any = None) -> None:
    """Write a checkpoint whose tensors are sharded over the ranks; every rank calls it, with its own shards.

    An interrupted write leaves a folder without a manifest, which no reader takes for a checkpoint.

    Args:
        first_on_node: this rank clears away what an earlier world, of more ranks perhaps, left under this name.
        group: of all ranks; one of its own where a thread writes beside the training.
    """
    tensors, rest = split(checkpoint)
    dist.barrier(group)  # whoever keeps a second name for what lies there has made it
    if first_on_node and folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # nodes that share the disk are at it together
    dist.barrier(group)
    with full_disk_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_files(tensors, rest, folder, group)
    dist.barrier(group)


def _write_files(tensors: dict[str, Tensor], rest: State, folder: Path, group: Any) -> None:
    dcp.save(
        {name: value.detach() for name, value in tensors.items()},
        storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
        process_group=group,
    )
    rank = dist.get_rank()
    if rank == 0:
        with open(folder / REST, "wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
    own = [path for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*"))] + [folder / REST] * (rank == 0)
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, {path.name: asdict(checksum_of(path)) for path in own}, group)
    if rank == 0:
        files = {name: entry for part in gathered for name, entry in part.items()}
        shapes = {name: list(value.shape) for name, value in tensors.items()}
        _write_manifest(folder, {"format": FORMAT, "world_size": len(gathered), "files": files, "tensors": shapes})


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    temporary = folder / f"{MANIFEST}.tmp"
    with open(temporary, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)


def check(folder: Path, hashes: bool = False) -> Manifest:
    """The manifest of a complete folder.

    Raises:
        UserError: a file is missing or has another size (with `hashes`: another content) than the manifest says.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        files, written = manifest["files"], manifest["format"]
        sizes = {name: entry["bytes"] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} is no complete folder of shards ({type(error).__name__}: {error}).") from None
    if written != FORMAT:
        raise UserError(f"{folder} has shard format {written}; this version reads {FORMAT}.")
    strangers = {path.name for path in folder.glob("*.safetensors")} - files.keys()
    if strangers:
        raise UserError(
            f"{folder} holds {min(strangers)}, which its manifest does not name: it is of another checkpoint."
        )
    for name, entry in files.items():
        path = folder / Path(name).name
        if not path.is_file() or path.stat().st_size != sizes[name]:
            raise UserError(f"{folder} is torn: {name} is missing or not {sizes[name]} bytes long.")
        if hashes and asdict(checksum_of(path)) != entry:
            raise UserError(f"{folder} is damaged: {name} has not the content that was written.")
    return manifest


def read(folder: Path, own: Mapping[str, Tensor] | None = None) -> State:
    """The checkpoint that a folder of shards holds.

    Args:
        own: parameters by the flat name of the weight, and of the optimizer state without the state's own name.
            What is sharded there comes back sharded alike, each rank reading only its part; all else is read whole.
    Raises:
        UserError: a file is missing or damaged, or holds what no checkpoint does.
    """
    with refused(folder):
        check(folder)
        rest = load_plain(folder / REST)
        reader = dcp.HuggingFaceStorageReader(str(folder))
        targets: dict[str, Tensor] = {}
        for name, stored in _stored(reader, folder).items():
            match = (own or {}).get(name, (own or {}).get(name.rpartition("/")[0]))
            if isinstance(match, DTensor) and match.shape == stored.size:
                targets[name] = torch.empty_like(match.detach(), dtype=stored.properties.dtype)
            else:
                targets[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            try:
                dcp.load(targets, storage_reader=reader, no_dist=True)
            except dcp.CheckpointException as error:  # which is no Exception
                raise NotSafe(f"its shards are damaged ({error})") from None
        return checked_checkpoint(join(targets, rest))


def _stored(reader: dcp.HuggingFaceStorageReader, folder: Path) -> Mapping[str, Any]:
    """Shapes and types of the tensors by their names.

    Raises:
        NotSafe: they state more bytes than the files have: no memory is made for those.
    """
    stored = reader.read_metadata().state_dict_metadata
    stated = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in stored.values())
    there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if stated > there:
        raise NotSafe(f"its shards state {stated} bytes and have {there}")
    return stored


def load_checkpoint(path: str | Path) -> State:
    """A checkpoint from a file or from a folder of shards, whole, in CPU memory, with weights_only=True."""
    if is_shard_folder(path):
        return read(Path(path))
    with refused(path):
        return checked_checkpoint(load_plain(path, mmap=True))

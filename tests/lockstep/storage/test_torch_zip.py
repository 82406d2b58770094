"""What a checkpoint would unpack to, before torch reads it: nothing here needs torch."""

import io
import pickle
import struct
import zipfile

import pytest

from lockstep.storage.torch_zip import NotSafe, check_torch_zip

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuJ%stQJ%s(J%st(J%st\x89NtR"
)


def number(value):
    return struct.pack("<i", value)


def tensor(items, offset, size, stride):
    """The pickle of a tensor of one dimension in storage 0."""
    return b"\x80\x02" + TENSOR % tuple(map(number, (items, offset, size, stride))) + b"."


def archive(path, data, storage=16, name="archive", **options):
    with zipfile.ZipFile(path, "w", **options) as made:
        made.writestr(f"{name}/data.pkl", data)
        made.writestr(f"{name}/data/0", bytes(storage))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.ckpt"


@pytest.mark.parametrize(
    "given", [(4, 0, 4, 1), (4, 1, 3, 1), (4, 3, 1, 1000), (4, 0, 0, 7), (0, 0, 0, 1), (4, 0, 2, 3)]
)
def test_a_tensor_within_its_bytes(given, path):
    check_torch_zip(archive(path, tensor(*given)))


@pytest.mark.parametrize("given", [(4, 0, 5, 1), (4, 1, 4, 1), (4, 0, 2, 4), (4, 0, 2**31 - 1, 0), (4, 4, 1, 1)])
def test_a_tensor_beyond_its_bytes_or_of_repeated_ones(given, path):
    with pytest.raises(NotSafe, match="is larger than its 4 numbers"):
        check_torch_zip(archive(path, tensor(*given)))


def test_a_storage_that_states_more_than_the_file_has(path):
    """torch would read beyond the memory that it was given."""
    with pytest.raises(NotSafe, match="states 5 numbers for data/0, which holds fewer"):
        check_torch_zip(archive(path, tensor(5, 0, 1, 1)))
    with pytest.raises(NotSafe, match="states -1 numbers"):
        check_torch_zip(archive(path, tensor(-1, 0, 0, 1)))


def test_negative_sizes(path):
    with pytest.raises(NotSafe, match="a size that is none"):
        check_torch_zip(archive(path, tensor(4, 0, -1, 1)))


def test_what_would_unpack_to_more(path):
    """A megabyte of zeros packs into a thousandth."""
    with pytest.raises(NotSafe, match="it is compressed"):
        check_torch_zip(archive(path, tensor(4, 0, 4, 1), storage=10**6, compression=zipfile.ZIP_DEFLATED))
    data = bytearray(archive(path, tensor(4, 0, 4, 1)).read_bytes())
    entry = data.rfind(b"PK\x01\x02")
    struct.pack_into("<II", data, entry + 20, 10**9, 10**9)
    path.write_bytes(data)
    with pytest.raises(NotSafe, match="would unpack to 1000000"):
        check_torch_zip(path)


def test_a_second_file_of_the_same_name(path):
    with zipfile.ZipFile(path, "w") as made:
        for name in ("archive/data.pkl", "archive/DATA.pkl"):
            made.writestr(name, b"\x80\x02N.")
    with pytest.raises(NotSafe, match="list of files"):
        check_torch_zip(path)


@pytest.mark.parametrize(
    "data, says",
    [
        (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "asks for __builtin__.bytearray"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x09\x00\x00\x00hex_codec\x86R.", "asks for _codecs.encode"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", "asks for os.system"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a place beyond its end"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "FRAME"),
        (pickle.dumps(b"x" * 10, 5), "which torch does not write"),
        (b"\x80\x02cnumpy\ncore.multiarray\n.", "asks for numpy"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__Nsb.", "changes what it names"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x08\x00\x00\x00__init__Nsb.", "other attributes than torch"),
        (b"\x80\x02" + TENSOR % tuple(map(number, (4, 0, 4, 1))) + b"}X\x01\x00\x00\x00xNsb.", "changes a tensor"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n(N\x89NtR.", "calls _rebuild_parameter with"),
    ],
)
def test_a_pickle_that_asks_for_more_than_tensors(data, says, path):
    with pytest.raises(NotSafe, match=says):
        check_torch_zip(archive(path, data))


def test_too_many_instructions(path, monkeypatch):
    import lockstep.storage.torch_zip as module

    monkeypatch.setattr(module, "MAX_OPCODES", 100)
    check_torch_zip(archive(path, b"\x80\x02" + b"N" * 90 + b"."))
    with pytest.raises(NotSafe, match="more than 100 instructions"):
        check_torch_zip(archive(path, b"\x80\x02" + b"N" * 110 + b"."))


@pytest.mark.parametrize("data", [b"", b"x" * 100, pickle.dumps({"state_dict": {}}, 2), b"PK\x03\x04" + bytes(100)])
def test_what_is_not_torchs_format(data, path):
    path.write_bytes(data)
    with pytest.raises(NotSafe, match="not in torch's zip format"):
        check_torch_zip(path)


def test_files_beside_and_torchscript(path):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02N.")
        made.writestr("archive/constants.pkl", b"\x80\x02N.")
    with pytest.raises(NotSafe, match="TorchScript"):
        check_torch_zip(path)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as beside:
        beside.writestr("archive/data.pkl", b"\x80\x02N.")
        beside.writestr("../x", b"")
    path.write_bytes(made.getvalue())
    with pytest.raises(NotSafe, match="or files beside it"):
        check_torch_zip(path)

"""Members of tar archives, as Python's tarfile finds them; what is cut off or no archive is said."""

import io
import random
import tarfile

import pytest

from lockstep.data.tar_index import BadArchive, members

LONG = "folder/" * 30 + "caf\u00e9.jpg"


def archive(path, names=("a.jpg", "b/c.cls", LONG), **options):
    with tarfile.open(path, "w", **options) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 300 * number + 1, 1.5  # of a fraction pax writes a header
            tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        folder = tarfile.TarInfo("b")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return path


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(kind, tmp_path):
    path = archive(tmp_path / "x.tar", format=kind)
    with tarfile.open(path) as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert [tuple(each) for each in members(path)] == expected and len(expected) == 3


def test_long_names_of_ustar(tmp_path):
    path = archive(tmp_path / "x.tar", names=("d" * 90 + "/" + "e" * 90,), format=tarfile.USTAR_FORMAT)
    assert [each.name for each in members(path)] == ["d" * 90 + "/" + "e" * 90]


def test_wherever_it_is_cut_off_that_is_said(tmp_path):
    whole = archive(tmp_path / "x.tar").read_bytes()
    end = whole.rstrip(b"\0")
    for length in (0, 100, 512, 700, 1024, 2000, len(end)):
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises(BadArchive, match="is cut off"):
            list(members(tmp_path / "cut.tar"))


def test_what_is_no_archive_is_said(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"no archive" * 200)
    with pytest.raises(BadArchive, match="is no tar archive"):
        list(members(tmp_path / "x.tar"))


def test_a_header_whose_sum_is_wrong_is_named_by_its_place(tmp_path):
    path = archive(tmp_path / "x.tar", format=tarfile.GNU_FORMAT)
    path.write_bytes(b"A" + path.read_bytes()[1:])
    with pytest.raises(BadArchive, match="is no tar archive, or damaged at byte 0"):
        list(members(path))


@pytest.mark.parametrize("field", [b"-0000000777\0", b"0000000_777\0", b"99999999999\0", b"\xff" * 12])
def test_a_size_that_is_no_size(field, tmp_path):
    data = bytearray(archive(tmp_path / "x.tar", format=tarfile.GNU_FORMAT).read_bytes())
    data[124:136] = field
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(BadArchive):
        list(members(tmp_path / "x.tar"))


def test_damage_anywhere_ends_in_a_list_or_in_a_sentence(tmp_path):
    whole = archive(tmp_path / "x.tar", format=tarfile.PAX_FORMAT).read_bytes()
    chance = random.Random(0)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 20)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "y.tar").write_bytes(data)
        try:
            found = list(members(tmp_path / "y.tar"))
        except BadArchive:
            continue
        assert all(0 <= each.start <= each.start + each.size <= len(data) for each in found)


def test_a_name_is_not_read_into_memory_without_end(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("long")
        info.type, info.size = b"L", 2**20
        tar.addfile(info, io.BytesIO(bytes(2**20)))
    with pytest.raises(BadArchive, match="holds a name of 1048576 bytes"):
        list(members(path))

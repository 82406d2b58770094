"""Small files from elsewhere: limits on bytes, depth and values, and one error whatever is wrong."""

import os
import time

import pytest
import yaml

from lockstep.runs import foreign_files
from lockstep.runs.foreign_files import NotReadable, parse_json, parse_yaml, read_json, read_yaml

BOMB = "x0: &x0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
MERGES = "x0: &x0 {a: 1}\n" + "".join(f"x{i}: &x{i} {{<<: [*x{i - 1}, *x{i - 1}]}}\n" for i in range(1, 30))


@pytest.mark.parametrize("text", [BOMB, MERGES])
def test_aliases_count_as_much_as_what_they_repeat(text):
    """Some hundred bytes that stand for millions of values cost no time."""
    began = time.monotonic()
    with pytest.raises(NotReadable, match="more than 100000 values, aliases written out"):
        parse_yaml(text)
    assert time.monotonic() - began < 1.0


def test_aliases_as_older_configs_have_them():
    shared = {"lr": 0.1, "betas": [0.9, 0.99]}
    text = yaml.safe_dump({"a": shared, "b": shared, "c": [shared["betas"]] * 2})
    assert "*id" in text
    assert parse_yaml(text) == {"a": shared, "b": shared, "c": [[0.9, 0.99]] * 2}


@pytest.mark.parametrize(
    "text, says",
    [
        ("a: &a [*a]", "names nothing before it, or itself"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ("[" * 100_000, "deeper than 64"),
        ("- " * 1000 + "x", "deeper than 64"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("2001-40-40", "month must be"),
        ("{[1]: 2}", "unhashable"),
        (b"a: \xff", "."),
        ("a: \x00", "control characters"),
        ("- x\n" * 100_001, "more than 100000 values"),
    ],
)
def test_what_is_no_yaml_of_plain_values(text, says):
    with pytest.raises(NotReadable, match=says):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ('{"a":' * 500 + "1" + "}" * 500, "deeper than 64"),
        ("[" * 100_000, "recursion"),
        (b'"\xff"', "utf-8"),
        ("1" * 5000, "digits"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_json(text, says):
    with pytest.raises(NotReadable, match=says):
        parse_json(text)


def test_64_levels_are_read():
    nested = "[" * 64 + "]" * 64
    assert str(parse_json(nested)).replace(" ", "") == nested == str(parse_yaml(nested)).replace(" ", "")


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("[1, 2]")
    assert read_json(path, max_bytes=6) == [1, 2]
    with pytest.raises(NotReadable, match="longer than 5 bytes"):
        read_json(path, max_bytes=5)
    monkeypatch.setattr(foreign_files, "MAX_YAML_BYTES", 5)
    with pytest.raises(NotReadable, match="longer than 5 bytes"):
        read_yaml(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(NotReadable, match="no plain file"):
        read_json(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nothing.json")

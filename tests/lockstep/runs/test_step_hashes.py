"""hashes.bin: written, cut, read back, compared; damage and other files are refused in a sentence."""

import json

import numpy as np
import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.step_hashes import Hashes, Head, add_rows, begin_hashes, first_difference, joined, read_hashes

HEAD = Head(4, ("a", "b"), ("a", "b", "mean"))


def rows_of(*steps, ranks=1, parts=1):
    """Rows whose words are all unlike."""
    words = np.arange(len(steps) * HEAD.width, dtype=np.int64).reshape(len(steps), -1) * 7919 - 10**12
    for row, step in zip(words, steps, strict=True):
        row[:3] = step, ranks, parts
        row[3:] += step * 10**6
    return words


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "hashes.bin"
    begin_hashes(path, HEAD, None)
    add_rows(path, rows_of(0, 1))
    add_rows(path, rows_of(2))
    found = read_hashes(path)
    assert found.head == HEAD and found.rows[:, 0].tolist() == [0, 1, 2]
    assert np.array_equal(found.rows[:2], rows_of(0, 1))
    assert [found.part(name).shape[1] for name in ("images", "loss", "gradients", "weights")] == [4, 1, 2, 3]


def test_a_row_cut_short_does_not_count_and_a_resume_takes_back_what_was_lost(tmp_path):
    path = tmp_path / "hashes.bin"
    begin_hashes(path, HEAD, None)
    add_rows(path, rows_of(0, 1, 2, 3))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    assert read_hashes(path).rows[:, 0].tolist() == [0, 1, 2]
    begin_hashes(path, HEAD, 1)
    add_rows(path, rows_of(2))
    assert read_hashes(path).rows[:, 0].tolist() == [0, 1, 2]
    begin_hashes(path, HEAD, 0)
    assert len(read_hashes(path).rows) == 0


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "first line|JSON|Expecting"),
        (b"no json\n", "holds no step hashes"),
        (b'{"version": 1}\n', "names no parts"),
        (HEAD.line().replace(b'"version": 1', b'"version": 2'), "version 2"),
        (HEAD.line().replace(b'"images": 4', b'"images": "4"'), "how large a batch"),
        (HEAD.line().replace(b'["a", "b"]', b'["a", 3]'), "have no names"),
        (HEAD.line() + rows_of(2, 1).tobytes(), "do not rise"),
    ],
)
def test_what_is_no_such_file_is_one_sentence(tmp_path, content, said):
    path = tmp_path / "hashes.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_hashes(path)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_hashes(tmp_path / "hashes.bin")


@pytest.mark.parametrize(
    "column, said",
    [
        (4, "in step 2: image 0 of the batch (counted from 0)"),
        (3, "in step 2: the loss, of the same images"),
        (9, "in step 2: the gradient of b"),
        (12, "in step 2: the weight of mean"),
    ],
)
def test_the_first_difference_is_named(column, said):
    one, other = Hashes(HEAD, rows_of(0, 1, 2, 3)), Hashes(HEAD, rows_of(0, 1, 2, 3))
    assert first_difference(one, other) == (None, 3, True)
    other.rows[2, column] ^= 1 << 40
    other.rows[3, 3:] ^= 1  # what follows from it
    assert str(first_difference(one, other)[0]) == said


def test_several_are_counted_and_step_0_is_before_the_first():
    one, other = Hashes(HEAD, rows_of(0, 1)), Hashes(HEAD, rows_of(0, 1))
    other.rows[1, 4:7] += 1
    assert str(first_difference(one, other)[0]) == "in step 1: image 0 and 2 more of 4 of the batch (counted from 0)"
    other.rows[0, -3:] += 1
    assert str(first_difference(one, other)[0]) == "before the first step: the weight of a and 2 more of 3"


def test_over_other_ranks_only_images_are_compared():
    one, other = Hashes(HEAD, rows_of(1, 2)), Hashes(HEAD, rows_of(1, 2, ranks=2))
    other.rows[:, 8:] += 1
    other.rows[:, 3] += 1
    assert first_difference(one, other) == (None, 2, False)
    other.rows[1, 5] += 1
    assert first_difference(one, other)[0].names == ["1"]


def test_steps_that_only_one_has_are_left_out():
    assert first_difference(Hashes(HEAD, rows_of(0, 1, 2)), Hashes(HEAD, rows_of(0, 1, 2)[1:2]))[1] == 1
    with pytest.raises(UserError, match="no step in common"):
        first_difference(Hashes(HEAD, rows_of(1)), Hashes(HEAD, rows_of(2)))


def test_other_nets_and_batches_are_refused():
    for head, what in ((Head(5, *("", "")), "global batches"), (Head(4, ("a", "c"), ("a",)), "parameters")):
        with pytest.raises(UserError, match=f"other {what}"):
            first_difference(Hashes(HEAD, rows_of(1)), Hashes(head, np.ones((1, head.width), np.int64)))


def test_images_of_all_ranks_stand_in_the_order_of_the_global_batch():
    """Rank r of 2 has image j·4 + r·2 + i of micro-batch j."""
    ranks = np.array([[[0, 1, 4, 5, 100, 200, 7]], [[2, 3, 6, 7, 300, 400, 9]]])
    found = joined(ranks, 2, 4)[0]
    assert found[:2].tolist() == [2, 2] and found[3:11].tolist() == list(range(8)) and found[11] == 7 + 3 * 9
    swapped = ranks.copy()
    swapped[:, 0, 4] = 300, 100  # the losses of two ranks change places
    assert joined(swapped, 2, 4)[0, 2] != found[2]


def test_names_in_the_head_survive(tmp_path):
    path = tmp_path / "hashes.bin"
    begin_hashes(path, Head(1, ("blöcke.0\n",), (), True), None)
    assert read_hashes(path).head == Head(1, ("blöcke.0\n",), (), True)
    assert json.loads(path.read_bytes().splitlines()[0])["sharded"] is True

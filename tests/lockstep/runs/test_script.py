"""What ends a script: a refusal and a full disk are one sentence, a fault of the code is none."""

import errno

import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.script import exit_code_of


class Differs(Exception):
    pass


def failing(error):
    def task():
        raise error

    return task


def test_the_tasks_own_code_and_none_for_success():
    assert exit_code_of(lambda: None) == 0 and exit_code_of(lambda: 3) == 3


def test_refusals_are_one_sentence(capsys):
    assert exit_code_of(failing(UserError("give a file."))) == 2
    assert exit_code_of(failing(Differs("they differ.")), Differs) == 2
    assert capsys.readouterr().err == "error: give a file.\nerror: they differ.\n"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EISDIR])
def test_a_place_that_cannot_be_written_is_one_sentence(number, capsys):
    assert exit_code_of(failing(OSError(number, "not so", "/mnt/x"))) == 2
    assert capsys.readouterr().err == "error: /mnt/x cannot be written or read: not so.\n"


def test_a_fault_of_the_code_stays_one():
    with pytest.raises(Differs):
        exit_code_of(failing(Differs("they differ.")))
    with pytest.raises(OSError):
        exit_code_of(failing(OSError(errno.EACCES, "Permission denied")))


def test_a_ctrl_c_before_the_run_begins_is_no_traceback():
    assert exit_code_of(failing(KeyboardInterrupt())) == 130

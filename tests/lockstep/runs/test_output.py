"""What a run says, and what another process of the machine has said already."""

import logging

from lockstep.runs.output import only_warnings

log = logging.getLogger("lockstep.storage.fetch")


def test_what_another_process_says_is_said_once_but_for_warnings(capsys):
    with only_warnings("lockstep.storage"):
        log.info("Passed over last-step00000010.ckpt.")
        log.warning("the store is too busy")
    log.info("afterwards")
    said = capsys.readouterr()
    assert said.out == "afterwards\n" and said.err == "warning: the store is too busy\n"

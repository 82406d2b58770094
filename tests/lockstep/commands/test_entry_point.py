"""The command of the installed package: new, doctor and what it refuses."""

import os
import subprocess
import sys

import pytest

from lockstep.commands import entry_point


def test_without_a_command_it_lists_what_there_is(capsys):
    assert entry_point.main([]) == 0
    assert "lockstep-vision new birds" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["new"], ["new", "--help"], ["train"], ["new", *"abc"]])
def test_what_is_no_command_is_one_sentence(arguments, capsys):
    assert entry_point.main(arguments) == 2
    assert capsys.readouterr().err.count("lockstep-vision new birds") == 1


def test_new_refuses_a_name_in_one_sentence(capsys):
    assert entry_point.main(["new", "Birds"]) == 2
    assert "Birds is not a project name" in capsys.readouterr().err


def test_a_projects_own_wheel_has_no_files_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(entry_point, "PACKAGE", tmp_path / "site-packages/lockstep")
    assert entry_point.main(["new", "birds"]) == 2
    assert "has no files of another" in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_needs_no_project(tmp_path):
    command = [sys.executable, "-m", "lockstep.commands.entry_point", "doctor", "trainer=cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert f"runs are written to {tmp_path}/logs" in done.stdout, done
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []

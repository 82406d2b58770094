"""A script in a forked process ends as one that Python has started."""

import multiprocessing

import pytest

from lockstep.runs.forked import run_forked


def run(words, folder, overrides=(), environ=None):
    script, output = folder / "script.py", folder / "output.txt"
    script.write_text(f"import os, sys, time\n{words}\n")
    code = run_forked(script, list(overrides), environ or {"PATH": ""}, output)
    return code, output.read_text()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("sys.exit(75)", 75),
        ("pass", 0),
        ("sys.exit(None)", 0),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_exit_code_is_that_of_the_script(words, code, tmp_path):
    assert run(words, tmp_path)[0] == code


def test_a_script_has_its_arguments_its_environment_and_its_output(tmp_path):
    words = "print(__name__, sys.argv[1:], sorted(os.environ))\n1 / 0"
    _, output = run(words, tmp_path, ["seed=1"], {"A": "1"})
    assert "__main__ ['seed=1'] ['A']" in output
    assert "ZeroDivisionError: division by zero" in output


def test_a_script_starts_its_own_processes_as_a_command_does(tmp_path):
    _, output = run("import multiprocessing as m; print(m.get_start_method())", tmp_path)
    assert output.split() == [multiprocessing.get_all_start_methods()[0]]

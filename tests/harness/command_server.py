"""Run `python src/SCRIPT.py …` in a copy of the repository, forked from a process with torch.

    server = CommandServer()
    done = server.run("python src/train.py experiment=quickstart", folder)

An import of torch and Lightning takes longer than most of such runs. The server has installed
packages alone: the copy's own modules are imported by each command, as Python does it.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

IMPORTED_ONCE = ("torch.utils.tensorboard", "lightning.pytorch", "torchmetrics", "torchvision",
                 "hydra", "omegaconf", "matplotlib.figure")  # fmt: skip


def is_script(command: str) -> bool:
    """Return whether a command is one script of src/ and no more, as the shell would read it."""
    words = shlex.split(command, comments=True)
    if words[:1] != ["python"] or not words[1:2] or not words[1].startswith("src/"):
        return False
    # The shell takes what stands in single quotes as it is.
    rest = re.sub("'[^']*'", "", command)
    return words[1].endswith(".py") and not set("|&;<>$`{*?(\n") & set(rest)


class CommandServer:
    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, command: str, folder: Path, environ: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command, comments=True)
        with tempfile.TemporaryDirectory() as outputs:
            request = {"argv": words[1:], "folder": str(folder), "environ": environ}
            try:
                self.process.stdin.write(json.dumps({**request, "outputs": outputs}) + "\n")
                self.process.stdin.flush()
                code = int(self.process.stdout.readline())
            except BaseException:  # a test's time is over
                self.process.kill()
                self.start()
                raise
            texts = [(Path(outputs) / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, code, *texts)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    for name in IMPORTED_ONCE:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_script(**request)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run_script(argv: list[str], folder: str, environ: dict[str, str], outputs: str) -> None:
    """Run a script in this process as Python does, and end with its exit code."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = argv
    sys.dont_write_bytecode = True
    sys.path[0] = str(Path(folder, argv[0]).parent)
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()

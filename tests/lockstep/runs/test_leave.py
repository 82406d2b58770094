"""What must happen at the end of a process happens, and nothing of torch is taken apart."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"
SCRIPT = """
import atexit, concurrent.futures, sys, threading, time, types
sys.path.insert(0, sys.argv[1])
from lockstep.runs.leave import leave

class Loud:
    def __del__(self):
        print("taken apart")

sys.modules["torch"] = types.ModuleType("torch") if sys.argv[2] == "torch" else None
if sys.argv[2] != "torch":
    del sys.modules["torch"]
loud = Loud()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
pool = concurrent.futures.ThreadPoolExecutor(1)  # never shut down
pool.submit(time.sleep, 0)
print("main")
leave(75)
"""


def end(kind: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(SRC), kind], capture_output=True, text=True, timeout=30)
    assert not done.stderr
    return done.returncode, done.stdout.split("\n")[:-1]


def test_threads_and_exit_functions_run_and_the_code_is_kept():
    assert end("torch") == (75, ["main", "thread", "atexit"])


def test_without_torch_python_ends_as_ever():
    assert end("plain") == (75, ["main", "thread", "atexit", "taken apart"])
